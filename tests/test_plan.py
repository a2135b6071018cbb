"""What is live, what is not, and that a plan does what it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor.models import EngineRequest
from llamactl_supervisor.option_table import ArgsAnswer
from llamactl_supervisor.plan import NoChange, Plan, Reconfigure, Relaunch, plan
from llamactl_supervisor.spec import EngineSpec, engine_spec

CLASSES = {"--threads": "context", "--temp": "server", "--lora": "model", "--mmproj": "model"}
CLASSES |= {"--ctx-size": "live", "--parallel": "live", "--kv-unified": "live"}
OPTIONS = [
    {"name": name, "args": [name], "args_neg": [], "env": None, "arity": 1, "class": kind}
    for name, kind in CLASSES.items()
]
Flag = tuple[str, str]


def spec(
    *flags: Flag, model: str = "/m.gguf", files: dict[str, str] | None = None, **fields: Any
) -> EngineSpec:
    told = [{"name": name, "values": [value], "source": "argv"} for name, value in flags]
    answer = ArgsAnswer.model_validate({"build": "b1", "options": OPTIONS, "given": told})
    known = {"build_content": "e1", "files": {model: "f1"} | (files or {}), "context": {}}
    return engine_spec(answer, EngineRequest(model=model), **(known | fields))


def reasons(verdict: Plan) -> list[tuple[str, str, object, object]]:
    assert isinstance(verdict, Relaunch)
    return [(each.field, each.kind, each.before, each.after) for each in verdict.reasons]


SIZES = st.sampled_from(["0", "4096", "8192", "10000"])
SLOTS = st.sampled_from(["-1", "1", "2", "3"])
LIVE = st.fixed_dictionaries(
    {},
    optional={"--ctx-size": SIZES, "--parallel": SLOTS, "--kv-unified": st.sampled_from("01")},
).map(lambda found: list(found.items()))
COLD = st.lists(
    st.tuples(st.sampled_from(["--threads", "--temp", "--lora", "--mmproj"]), st.sampled_from("ab"))
)
FLAGS = st.tuples(LIVE, COLD).map(lambda both: both[0] + both[1])


def interleaved(draw: st.DataObject, flags: list[Flag]) -> list[Flag]:
    """Return the flags in another order in which those of one name keep theirs."""
    order = draw.draw(st.permutations([name for name, _ in flags]))
    left: dict[str, list[str]] = {}
    for name, value in flags:
        left.setdefault(name, []).append(value)
    return [(name, left[name].pop(0)) for name in order]


@given(FLAGS)
def test_what_runs_needs_no_change(flags: list[Flag]) -> None:
    assert plan(spec(*flags), spec(*flags)) == NoChange()


@given(FLAGS, FLAGS, st.data())
def test_the_order_of_independent_flags_is_no_matter(
    one: list[Flag], two: list[Flag], data: st.DataObject
) -> None:
    verdict = plan(spec(*one), spec(*two))
    assert plan(spec(*interleaved(data, one)), spec(*interleaved(data, two))) == verdict
    assert plan(spec(*one), spec(*interleaved(data, one))) == NoChange()


@given(FLAGS, FLAGS)
def test_a_plan_that_was_carried_out_has_nothing_left(one: list[Flag], two: list[Flag]) -> None:
    running, desired = spec(*one), spec(*two)
    verdict = plan(running, desired)
    if isinstance(verdict, Reconfigure):
        asked = verdict.change
        running = running.with_geometry(
            asked.n_ctx or running.n_ctx, asked.n_seq or running.n_seq, asked.kv_unified
        )
    elif isinstance(verdict, Relaunch):
        assert verdict.reasons
        running = desired
    assert plan(running, desired) == NoChange()


@given(LIVE, LIVE, COLD)
def test_what_is_live_alone_relaunches_only_to_leave_the_context_to_the_engine(
    one: list[Flag], two: list[Flag], cold: list[Flag]
) -> None:
    running, desired = spec(*one, *cold), spec(*two, *cold)
    verdict = plan(running, desired)
    to_auto = desired.n_ctx == "auto" != running.n_ctx
    assert isinstance(verdict, Relaunch) == to_auto
    if isinstance(verdict, Relaunch):
        assert [each.field for each in verdict.reasons] == ["n_ctx"]


@given(FLAGS, FLAGS)
def test_each_cold_field_that_differs_is_a_reason(one: list[Flag], two: list[Flag]) -> None:
    running, desired = spec(*one), spec(*two)
    differ = {name for name in CLASSES if running.options.get(name) != desired.options.get(name)}
    verdict = plan(running, desired)
    told = {each.field for each in verdict.reasons} if isinstance(verdict, Relaunch) else set()
    assert told - {"n_ctx"} == differ


def test_a_context_left_to_the_engine_is_a_value_of_its_own() -> None:
    auto, some = spec(), spec(("--ctx-size", "8192"), ("--parallel", "-1"))
    assert plan(auto, spec(("--ctx-size", "0"))) == NoChange()
    verdict = plan(auto, some)
    assert isinstance(verdict, Reconfigure)
    assert verdict.change.model_dump(exclude_unset=True) == {"n_ctx": 8192}
    assert reasons(plan(some, auto)) == [("n_ctx", "live", 8192, "auto")]


def test_a_number_of_slots_says_how_they_share() -> None:
    verdict = plan(spec(), spec(("--parallel", "4")))
    assert isinstance(verdict, Reconfigure)
    assert verdict.change.model_dump(exclude_unset=True) == {"kv_unified": False}
    assert plan(spec(), spec(("--parallel", "4"), ("--kv-unified", "1"))) == NoChange()


def test_the_last_of_several_sizes_counts() -> None:
    thrice = spec(("--ctx-size", "1024"), ("--ctx-size", "2048"), ("--ctx-size", "4096"))
    assert plan(thrice, spec(("--ctx-size", "4096"))) == NoChange()


@pytest.mark.parametrize(
    ("field", "kind"), [("--threads", "context"), ("--temp", "server"), ("--lora", "model")]
)
def test_every_reason_has_its_class_and_both_values(field: str, kind: str) -> None:
    verdict = plan(spec((field, "1")), spec((field, "2")))
    assert reasons(verdict) == [(field, kind, "1", "2")]
    assert reasons(plan(spec(), spec((field, "2")))) == [(field, kind, None, "2")]
    assert reasons(plan(spec((field, "1")), spec())) == [(field, kind, "1", None)]


def test_a_file_is_its_content() -> None:
    running = spec(("--lora", "/l"), files={"/l": "f2"})
    moved = spec(("--lora", "/k"), files={"/k": "f2", "/n.gguf": "f1"}, model="/n.gguf")
    assert plan(running, moved) == NoChange()
    replaced = spec(("--lora", "/l"), files={"/l": "f3"})
    expected = ("--lora", "model", "/l (content f2)", "/l (content f3)")
    assert reasons(plan(running, replaced)) == [expected]
    other = spec(model="/m.gguf", files={"/m.gguf": "f9"})
    assert [each[0] for each in reasons(plan(spec(), other))] == ["--model"]


def test_the_binary_and_the_process_count() -> None:
    assert reasons(plan(spec(), spec(build_content="e2"))) == [
        ("engine", "build", "b1 (e1)", "b1 (e2)")
    ]
    here, there = spec(context={"cwd": "/a"}), spec(context={"cwd": "/b", "nice": "5"})
    assert reasons(plan(here, there)) == [
        ("cwd", "process", "/a", "/b"),
        ("nice", "process", None, "5"),
    ]


def test_what_would_be_live_is_told_beside_the_reasons() -> None:
    verdict = plan(spec(("--parallel", "2")), spec(("--parallel", "3"), ("--threads", "3")))
    assert isinstance(verdict, Relaunch)
    assert [each.field for each in verdict.reasons] == ["--threads"]
    assert [each.field for each in verdict.changes] == ["n_seq"]
