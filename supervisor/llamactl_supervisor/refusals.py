"""Which codes a route of the control API answers, and how its description says them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from llamactl_supervisor.errors import Code, error, http_status
from llamactl_supervisor.models import PROBLEM_TYPE, Problem

ANY = (
    *(Code.INVALID_REQUEST, Code.BODY_TOO_LARGE, Code.REQUEST_TIMED_OUT, Code.INTERNAL),
    *(Code.METHOD_NOT_ALLOWED, Code.UNAUTHORIZED, Code.FORBIDDEN, Code.HOST_REFUSED),
)
"""Whatever is asked; the last three over TCP."""
POSTED = (Code.REQUEST_EXPIRED, Code.UNSUPPORTED_MEDIA_TYPE)
"""Of a change."""
ACCEPTED = (*POSTED, Code.SHUTTING_DOWN)
"""Of an operation, before it is one."""
GEOMETRY = (Code.INVALID_GEOMETRY,)
"""A slot, or a number of tokens or slots, out of bounds."""
ENGINE = (*GEOMETRY, Code.OWNED_ARGUMENT)
"""What an engine is to be, in the body."""
NOT_SERVING = (Code.ENGINE_STOPPED, Code.OPERATION_IN_PROGRESS)
ASKED = (
    *(*NOT_SERVING, Code.NOT_SUPPORTED, Code.TIMED_OUT, Code.OUT_OF_RESOURCES),
    *(Code.ENGINE_UNREACHABLE, Code.ENGINE_SOCKET_GONE),
    *(Code.ENGINE_ANSWER_BROKEN, Code.ENGINE_UNPROVEN),
)
"""Of what is asked of the engine at once."""

_PROBLEM = {PROBLEM_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}


def described(*codes: Code) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route that declines with these codes, and with those of `ANY`."""
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in sorted({*ANY, *codes}):
        by_status[http_status(error(code, ""))].append(f"`{code}`")
    told: dict[int | str, dict[str, Any]] = {
        status: {"content": _PROBLEM, "description": ", ".join(named)}
        for status, named in sorted(by_status.items())
    }
    # Without one the framework describes an answer of its own that is never given.
    return told | {"default": {"content": _PROBLEM, "description": "Of another version"}}
