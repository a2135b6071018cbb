"""One scenario, what it is given, and the list of all of them."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from llamactl_validate.daemon import Daemon
from llamactl_validate.engine import Engine
from llamactl_validate.expecting import NotReproducible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_S = 120.0
PATIENCE_S_PER_GIB = 60.0
"""More for a large model: a wedged engine is told from a slow one late, but never wrongly."""
OPTIONS = ("--metrics", "--cache-ram", "0")
"""Of every engine: the cache of old prompts would take memory that nobody counted."""
SLOT_TOKENS = 500
"""That a conversation of a scenario may come to, whatever the tokenizer."""
_T = TypeVar("_T")


class Scale(StrEnum):
    """How much of everything."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True)
class Measured:
    """One number that a scenario found."""

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        number = f"{self.value:.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{self.name} {number}{self.unit and ' '}{self.unit}"


class Engines:
    """One engine at a time, which scenarios share that ask for the same options."""

    def __init__(self, program: Path, model: Path, *, idle: bool = True) -> None:
        self.program, self.model = program, model
        self._idle = idle
        self._options: tuple[str, ...] = ()
        self._live: Engine | None = None

    @contextmanager
    def engine(self, *options: str) -> Iterator[Engine]:
        """Yield an engine with empty slots in its first geometry; it has to live to the end."""
        if self._live is not None and self._live.lives and options == self._options:
            self._live.reset()
        else:
            self.close()
            self._live = Engine(
                self.program,
                self.model,
                *OPTIONS,
                *options,
                patience_s=self._patience_s(),
                idle=self._idle,
            )
            self._options = options
        yield self._live

    @contextmanager
    def daemon(self, **settings: float) -> Iterator[Daemon]:
        """Yield a daemon whose engine is ready, with these settings of [daemon]; no other runs."""
        self.close()
        daemon = Daemon(
            *(self.program, self.model),
            patience_s=self._patience_s(),
            idle=self._idle,
            settings=settings,
        )
        with closing(daemon):
            yield daemon

    def _patience_s(self) -> float:
        return PATIENCE_S + PATIENCE_S_PER_GIB * self.model.stat().st_size / 2**30

    def close(self) -> None:
        """End the engine that there is; raises `Failed` where it had ended before."""
        live, self._live = self._live, None
        if live is not None:
            live.close()


@dataclass
class Trial:
    """What one run of a scenario is given, and what it has told so far."""

    engines: Engines
    scale: Scale = Scale.QUICK
    told: Callable[[str], None] = lambda _: None
    """Called with every step."""
    slot_tokens: int = 0
    """Tokens that a slot has to have room for."""
    measured: list[Measured] = field(default_factory=list)
    step: str = ""

    @contextmanager
    def engine(self, *options: str) -> Iterator[Engine]:
        """Yield an engine with empty slots in its first geometry; the step is the same after it.

        Raises `Skipped` where the model does not take what the scenario needs in a slot.
        """
        step = self.step
        self.now("an engine starts")
        with self.engines.engine(*options) as live:
            live.room_for(self.slot_tokens)
            self.now(step)
            yield live

    @contextmanager
    def daemon(self, **settings: float) -> Iterator[Daemon]:
        """Yield a daemon whose engine is ready; as `engine` otherwise."""
        step = self.step
        self.now("a daemon and its engine start")
        with self.engines.daemon(**settings) as daemon:
            daemon.engine().room_for(self.slot_tokens)
            self.now(step)
            yield daemon

    def now(self, step: str) -> None:
        """Say what is done from here on; a failure names it."""
        self.step = step
        self.told(step)

    def measure(self, name: str, value: float, unit: str = "") -> None:
        """Add a number to the report."""
        self.measured.append(Measured(name, value, unit))

    def number(self, quick: int, full: int) -> int:
        """Return how many, at this scale."""
        return full if self.scale is Scale.FULL else quick

    def control(self, run: Callable[[], _T]) -> _T:
        """Return what comes of a run that nothing disturbs; twice the same, or nothing is shown."""
        self.now("the control runs")
        first, second = run(), run()
        if first != second:
            raise NotReproducible("two control runs differ")
        return first


@dataclass(frozen=True)
class Scenario:
    """What is shown, and how."""

    name: str
    suite: str
    title: str
    """What holds where it passes."""
    run: Callable[[Trial], None]
    n_steps: tuple[int, int]
    """About how many forward passes it takes, quick and full: what time it needs."""
    n_loads: tuple[int, int]
    """How many engines it starts that no other scenario shares."""
    instead: Callable[[Trial], None] | None = None
    """What is compared where runs are not reproducible."""
    slot_tokens: int = SLOT_TOKENS
    """It is skipped where the model does not take so many in a slot."""

    @property
    def id(self) -> str:
        """What it is called in a report."""
        return f"{self.suite}.{self.name}"


_all: dict[str, Scenario] = {}


def scenario(
    title: str,
    *,
    n_steps: tuple[int, int],
    n_loads: tuple[int, int] = (0, 0),
    instead: Callable[[Trial], None] | None = None,
    slot_tokens: int = SLOT_TOKENS,
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Add a function to the scenarios; its module is the suite, its name is its own."""

    def add(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        suite = run.__module__.rpartition(".")[2]
        name = run.__name__.replace("_", "-")
        added = Scenario(name, suite, title, run, n_steps, n_loads, instead, slot_tokens)
        if added.id in _all:
            raise ValueError(f"two scenarios are called {added.id}")
        _all[added.id] = added
        return run

    return add


def registered() -> list[Scenario]:
    """Return every scenario of the suites that are imported, in the order of their definition."""
    return list(_all.values())
