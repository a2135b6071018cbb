"""Whether an `up` asks for what runs already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_supervisor.launch import live_spec

if TYPE_CHECKING:
    from llamactl_supervisor.models import Override, UpRequest


@dataclass(frozen=True)
class Repeated:
    """The running engine answers the request."""


@dataclass(frozen=True)
class Conflict:
    """It does not; `fields` maps each differing field to (running, requested)."""

    fields: dict[str, tuple[object, object]]


def compare(
    running: UpRequest, override: Override | None, asked: UpRequest, *, exact: bool = False
) -> Repeated | Conflict:
    """Compare what is asked for with what was asked for last, never with effective values.

    libllama rounds (10000 over 3 slots becomes 10752), so a comparison with what the engine
    reports would differ for ever. A geometry that was set live counts as asked for as well, and
    where the one asked for is to be `exact`, it alone counts.
    """
    live = running.model_copy(update={"spec": live_spec(running.spec, override)})
    if asked == live or (asked == running and not exact):
        return Repeated()
    fields: dict[str, tuple[object, object]] = {
        name: (getattr(live.spec, name), getattr(asked.spec, name))
        for name in type(asked.spec).model_fields
        if getattr(live.spec, name) != getattr(asked.spec, name)
    }
    if live.engine_path != asked.engine_path:
        fields["engine_path"] = (live.engine_path, asked.engine_path)
    if live.context != asked.context:
        fields["process"] = (_whose(live), _whose(asked))
    return Conflict(fields)


def _whose(request: UpRequest) -> str:
    return "its own" if request.context is None else "that of a `llamactl run`"
