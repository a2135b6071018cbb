"""What takes an engine from what it was asked to be to what it is to be. Pure and total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor.fields import AUTO
from llamactl_supervisor.models import PlanField, ReconfigureRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamactl_supervisor.spec import EngineSpec

SHORT = 12
"""Digits of a fingerprint that are shown."""


@dataclass(frozen=True)
class NoChange:
    """The engine is what it is to be."""


@dataclass(frozen=True)
class Reconfigure:
    """The loaded weights stay: `changes` are asked of the engine, by `change`."""

    changes: tuple[PlanField, ...]
    change: ReconfigureRequest


@dataclass(frozen=True)
class Relaunch:
    """Another process is needed. `reasons` force it; `changes` would have been live."""

    reasons: tuple[PlanField, ...]
    changes: tuple[PlanField, ...] = ()


Plan = NoChange | Reconfigure | Relaunch


def plan(running: EngineSpec, desired: EngineSpec) -> Plan:
    """Compare what was last asked for with what is asked for; effective values play no part.

    A number of tokens that is left to the engine is a value of its own: it can be replaced live,
    but to leave the choice to the engine again takes a start.
    """
    live = tuple(_live(running, desired))
    reasons = [field for field in live if field.field == "n_ctx" and field.after == AUTO]
    reasons += _build(running, desired)
    reasons += _options(running, desired)
    reasons += _process(running, desired)
    changes = tuple(field for field in live if field not in reasons)
    if reasons:
        return Relaunch(tuple(reasons), changes)
    if changes:
        asked = ReconfigureRequest.model_validate({each.field: each.after for each in changes})
        return Reconfigure(changes, asked)
    return NoChange()


def _live(running: EngineSpec, desired: EngineSpec) -> Iterator[PlanField]:
    for name in ("n_ctx", "n_seq", "kv_unified"):
        before, after = getattr(running, name), getattr(desired, name)
        if before != after:
            yield PlanField(field=name, kind="live", before=before, after=after)


def _build(running: EngineSpec, desired: EngineSpec) -> Iterator[PlanField]:
    if running.build_content != desired.build_content:
        before, after = running.build, desired.build
        if before == after:
            before = f"{before} ({running.build_content[:SHORT]})"
            after = f"{after} ({desired.build_content[:SHORT]})"
        yield PlanField(field="engine", kind="build", before=before, after=after)


def _options(running: EngineSpec, desired: EngineSpec) -> Iterator[PlanField]:
    for name in sorted(running.options.keys() | desired.options.keys()):
        if running.content(name) == desired.content(name):
            continue
        before, after = running.shown(name), desired.shown(name)
        if before == after:
            before, after = _replaced(running, name), _replaced(desired, name)
        known = desired.classes.get(name) or running.classes[name]
        yield PlanField(field=name, kind=known, before=before, after=after)


def _process(running: EngineSpec, desired: EngineSpec) -> Iterator[PlanField]:
    for name in sorted(running.context.keys() | desired.context.keys()):
        before, after = running.context.get(name), desired.context.get(name)
        if before != after:
            yield PlanField(field=name, kind="process", before=before, after=after)


def _replaced(spec: EngineSpec, name: str) -> str:
    """Return the option's values where it is the content alone that differs."""
    contents = ", ".join(" ".join(word[:SHORT] for word in one) for one in spec.content(name))
    return f"{spec.shown(name)} (content {contents})"
