"""What many applies come to together: that which those ask for that are told as succeeded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamactl_supervisor import applies, apply
from llamactl_supervisor import events as ev
from llamactl_supervisor.apply import comes_to
from llamactl_supervisor.fields import AUTO
from llamactl_supervisor.models import ApplyRequest, ApplyResult, EngineState, LifecycleResult
from machine import (
    ALL_KEPT,
    AT,
    FACTS,
    ONE_LOST,
    PROBLEM,
    READY,
    RECORD,
    REQUEST,
    SPEC,
    play,
    process,
    receipt,
)

if TYPE_CHECKING:
    from llamactl_supervisor.models import UpRequest
    from llamactl_supervisor.snapshot import Snapshot
    from llamactl_supervisor.spec import EngineSpec

LIVE: dict[str, Any] = {"n_ctx": 32768}
WIDER: dict[str, Any] = {"n_ctx": 24576}
SLOTS: dict[str, Any] = {"n_seq": 3}
COLD: dict[str, Any] = {"extra_args": ["--threads", "1"]}
COLDER: dict[str, Any] = {"extra_args": ["--threads", "3"]}
HOW = {"replace", "live_only", "accept_loss"}


def spec_of(request: UpRequest) -> EngineSpec:
    """Return what a binary takes the request for."""
    asked = request.spec
    n_ctx = SPEC.n_ctx if asked.n_ctx == AUTO else asked.n_ctx
    assert isinstance(n_ctx, int)
    options = {"--model": ((asked.model,),), "--args": (tuple(asked.extra_args),)}
    classes = {"--model": "model", "--args": "context"}
    spec = SPEC.with_geometry(n_ctx, asked.n_seq, asked.kv_unified)
    return spec.model_copy(update={"options": options, "classes": classes})


@dataclass
class World:
    """A daemon whose effects are carried out one at a time, and what was told of each apply.

    `refused`: applies that cannot be had; `fails`: whose change or load fails; `loses`: whose
    relaunch would lose a conversation.
    """

    refused: frozenset[str] = frozenset()
    fails: frozenset[str] = frozenset()
    loses: frozenset[str] = frozenset()
    snapshot: Snapshot = field(
        default_factory=lambda: replace(READY, running_spec=spec_of(REQUEST))
    )
    asked: dict[str, ApplyRequest] = field(default_factory=dict)
    told: dict[str, ApplyResult | LifecycleResult | str] = field(default_factory=dict)
    plans: dict[str, list[str]] = field(default_factory=dict)
    left: list[ev.Effect] = field(default_factory=list)
    done: list[ev.Effect] = field(default_factory=list)

    def ask(self, name: str, **asked: Any) -> None:
        """Ask for an apply as the daemon does."""
        wanted = self.asked[name] = ApplyRequest.parse(asked)
        request = applies.merged(applies.newest(self.snapshot), wanted)
        command = ev.Apply(name, request, spec_of(request), "me", wanted)
        lossy, live_only = wanted.accept_loss, wanted.live_only
        self.happens(replace(command, live_only=live_only, accept_loss=lossy))

    def happens(self, event: ev.Event) -> None:
        """Reduce an event."""
        self.snapshot, effects = play(self.snapshot, event)
        for effect in effects:
            if isinstance(effect, ev.Finish):
                assert effect.operation not in self.told
                assert isinstance(effect.result, ApplyResult | LifecycleResult)
                self.told[effect.operation] = effect.result
            elif isinstance(effect, ev.Fail | ev.Reject):
                assert effect.operation not in self.told
                self.told[effect.operation] = str(effect.problem.code)
            else:
                self.left.append(effect)

    def works(self) -> bool:
        """Carry out the oldest effect of which something comes; False: there is none."""
        while self.left:
            self.done.append(effect := self.left.pop(0))
            if (event := self._comes_of(effect)) is not None:
                self.happens(event)
                return True
        return False

    def rests(self) -> None:
        """Carry out everything."""
        while self.works():
            pass
        assert self.snapshot.state is EngineState.READY
        assert self.snapshot.pending is None
        assert self.told.keys() == self.asked.keys()

    def _comes_of(self, effect: ev.Effect) -> ev.Event | None:
        here, applying = self.snapshot.generation, self.snapshot.applying
        fails = applying is not None and applying.command.operation in self.fails
        match effect:
            case ev.Rebase():
                return ev.Rebased(effect.operation, effect.request, spec_of(effect.request))
            case ev.PlanApply(command=command, plan=plan):
                not_live = command.live_only and plan.action in applies.LOADS
                refused = command.operation in self.refused or not_live
                self.plans.setdefault(command.operation, []).append(plan.action)
                return ev.Planned(command.operation, PROBLEM if refused else plan)
            case ev.SendReconfigure(change=change):
                if fails:
                    return ev.ReconfigureFailed(here, PROBLEM)
                return ev.Reconfigured(here, change, receipt(), "me", AT)
            case ev.CarryOut():
                assert applying is not None
                lost = applying.command.operation in self.loses
                return ev.CarriedOut(here, ONE_LOST if lost else ALL_KEPT)
            case ev.Signal():
                return ev.Exited(here, RECORD, 0.5)
            case ev.Spawn(generation=generation, request=request):
                return ev.Spawned(generation, process(generation), spec_of(request))
            case ev.Watch(generation=generation):
                if fails and self.snapshot.state is EngineState.STARTING:
                    return ev.Exited(generation, RECORD, 0.5)
                return ev.Healthy(generation, FACTS, AT)
        return None

    def _spec(self) -> EngineSpec:
        assert self.snapshot.desired is not None
        return spec_of(self.snapshot.desired)

    def check(self) -> None:
        """Hold what is wanted, and what the engine is, against what was told."""
        request = REQUEST
        for name, asked in self.asked.items():
            if isinstance(self.told[name], ApplyResult):
                request = applies.merged(request, asked)
        wanted = applies.newest(self.snapshot)
        assert wanted is not None
        assert spec_of(wanted) == spec_of(request)
        assert comes_to(self.snapshot, spec_of(request)).action == "none"

    def came_to(self) -> dict[str, str]:
        """Return how each apply has ended: with which operation, or why not."""
        return {name: self._end(name) for name in self.asked}

    def _end(self, name: str) -> str:
        end = self.told[name]
        if isinstance(end, str):
            return end
        assert isinstance(end, ApplyResult)
        return end.with_operation or name


def burst(*asked: dict[str, Any], refused: str = "", fails: str = "") -> World:
    """Ask for all of these, a and b and so on, before it is known what the first comes to."""
    world = World(frozenset(refused), frozenset(fails))
    for name, engine in zip("abcd", asked, strict=False):
        how = {key: engine[key] for key in engine.keys() & HOW}
        fields = {key: engine[key] for key in engine.keys() - HOW}
        world.ask(name, engine=fields, **how)
    world.rests()
    world.check()
    return world


def test_each_is_told_what_came_of_it() -> None:
    world = burst(LIVE, COLD, WIDER)
    assert world.came_to() == {"a": "superseded", "b": "c", "c": "c"}
    told = world.told["b"]
    assert isinstance(told, ApplyResult)
    assert (told.applied, told.plan.action) == (True, "relaunch")
    assert told.lifecycle is not None
    assert world.snapshot.generation == 2, "one relaunch for both"


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_the_order_in_which_they_come_decides(order: tuple[str, ...]) -> None:
    what = {"a": LIVE, "b": COLD, "c": WIDER}
    world = burst(*(what[each] for each in order))
    ends = [world.came_to()[name] for name in "abc"]
    over = next(number for number, each in enumerate(order) if each in "ac")
    assert ends == ["superseded" if number == over else "c" for number in range(3)]


@pytest.mark.parametrize(
    ("asked", "refused", "fails", "came_to"),
    [
        ((SLOTS, COLD, LIVE, WIDER), "", "", ["d", "d", "superseded", "d"]),
        ((COLD, SLOTS, COLDER, LIVE), "", "", ["superseded", "d", "d", "d"]),
        ((SLOTS, COLD, LIVE, WIDER), "d", "", ["c", "c", "c", PROBLEM.code]),
        ((SLOTS, COLD, LIVE, WIDER), "b", "", ["d", PROBLEM.code, "superseded", "d"]),
        ((COLD, LIVE, COLDER), "c", "", ["b", "b", PROBLEM.code]),
        ((SLOTS, LIVE), "", "b", [PROBLEM.code] * 2),
        ((SLOTS, COLD), "", "b", ["apply_failed"] * 2),
        ((SLOTS, LIVE | {"replace": True}), "", "", ["superseded", "b"]),
        ((LIVE | {"replace": True}, WIDER), "", "", ["b", "b"]),
        (({"model": "/n.gguf"}, LIVE | {"replace": True}), "", "", ["b", "b"]),
    ],
)
def test_one_that_cannot_be_takes_nothing_of_the_others_with_it(
    asked: tuple[dict[str, Any], ...], refused: str, fails: str, came_to: list[str]
) -> None:
    assert list(burst(*asked, refused=refused, fails=fails).came_to().values()) == came_to


def test_one_that_is_to_be_live_is_not_refused_for_what_another_asks_for() -> None:
    world = burst(COLD, LIVE | {"live_only": True})
    assert world.came_to() == {"a": "a", "b": "b"}
    assert world.plans["b"][-1] == "reconfigure"
    assert burst(LIVE, COLD | {"live_only": True}).came_to() == {"a": "a", "b": PROBLEM.code}


@pytest.mark.parametrize("accept", [*itertools.product((False, True), repeat=2)])
def test_a_loss_is_accepted_where_each_of_them_accepts_it(accept: tuple[bool, bool]) -> None:
    world = burst(*({**e, "accept_loss": a} for e, a in zip((COLD, SLOTS), accept, strict=True)))
    asked = [e for e in world.done if isinstance(e, ev.CarryOut)]
    assert [each.may_lose for each in asked] == [all(accept)]


def test_a_stop_ends_those_that_are_carried_out_together() -> None:
    world = World()
    world.ask("a", engine=COLD)
    world.ask("b", engine=SLOTS)
    while world.snapshot.state is not EngineState.STOPPING:
        assert world.works()
    world.happens(ev.Stop("s"))
    while world.works():
        pass
    assert (world.told["a"], world.told["b"]) == ("superseded", "superseded")
    assert world.snapshot.desired == REQUEST


def test_those_that_a_daemon_dies_over_are_told_together() -> None:
    world = World()
    world.ask("a", engine=COLD)
    world.ask("b", engine=SLOTS)
    while world.snapshot.applying is None:
        assert world.works()
    first, second = apply.unended(world.snapshot)
    assert [first.command.operation, second.command.operation] == ["a", "b"]
    assert first.command.spec == second.command.spec, "what is to be in force is of both"


ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "n_ctx": st.sampled_from([8192, 16384, 32768]),
        "n_seq": st.integers(1, 4),
        "kv_unified": st.booleans(),
        "extra_args": st.sampled_from([(), ("--threads", "1"), ("--threads", "2")]),
    },
)
NAMES = st.frozensets(st.sampled_from("01234567"))
ASKED = st.fixed_dictionaries(
    {"engine": ENGINES},
    optional={name: st.booleans() for name in ("replace", "live_only", "accept_loss")},
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(ASKED, st.integers(0, 4)), min_size=1, max_size=8),
    NAMES,
    NAMES,
    NAMES,
)
def test_what_is_in_force_is_what_those_ask_for_that_are_told_as_succeeded(
    steps: list[tuple[dict[str, Any], int]],
    refused: frozenset[str],
    fails: frozenset[str],
    loses: frozenset[str],
) -> None:
    world = World(refused, fails, loses)
    for number, (asked, works) in enumerate(steps):
        world.ask(str(number), **asked)
        for _ in range(works):
            world.works()
    world.rests()
    world.check()
