"""What was set live to something else than was configured or asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamactl_cli import text

if TYPE_CHECKING:
    from llamactl_supervisor.models import Status

GEOMETRY = ("n_ctx", "n_seq", "kv_unified")


def fields(status: Status) -> dict[str, dict[str, Any]]:
    """Return each field that differs, with both values."""
    override, desired = status.override, status.desired
    if override is None or desired is None:
        return {}
    pairs = {name: (getattr(desired.spec, name), getattr(override, name)) for name in GEOMETRY}
    return {
        name: {"asked": asked, "live": live}
        for name, (asked, live) in pairs.items()
        if asked != live
    }


def drift(status: Status) -> str | None:
    """Return the same on one line; None where nothing differs."""
    changed = [
        f"{name} is {text.written(pair['live'])}, asked: {text.written(pair['asked'])}"
        for name, pair in fields(status).items()
    ]
    if status.override is None or not changed:
        return None
    return f"{'; '.join(changed)} (set live {text.local(status.override.at)})"
