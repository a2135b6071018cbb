"""Every error that llamactl can report: its stable code, its HTTP status and its exit code.

    LlamactlError
    ├── InvalidRequestError     exit 2   what was asked for makes no sense; nothing was tried
    ├── NotRunningError         exit 3   there is no engine to do it to
    ├── DaemonUnreachableError  exit 4   there is no daemon to ask
    ├── RefusedError            exit 5   understood and declined; everything is as it was before
    ├── TimedOutError           exit 6   it did not happen in time
    └── FailedError             exit 1   it was tried and went wrong

The class says what a script should do about it, the code says what happened. Codes never change
their meaning and travel unchanged from the engine or the daemon to the caller.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class ExitCode(IntEnum):
    """Exit codes of the `llamactl` command. Scripts rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    UNREACHABLE = 4
    REFUSED = 5
    TIMED_OUT = 6
    INTERRUPTED = 130


class Code(StrEnum):
    """Stable names of everything that can go wrong."""

    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    CONFIG_INVALID = "config_invalid"
    CONFIG_INSECURE = "config_insecure"
    MODEL_ELSEWHERE = "model_elsewhere"
    OWNED_ARGUMENT = "owned_argument"
    PATH_TOO_LONG = "path_too_long"

    ENGINE_STOPPED = "engine_stopped"
    ENGINE_UNKNOWN = "engine_unknown"
    ENGINE_UNPATCHED = "engine_unpatched"
    NO_SPEC = "no_spec"

    DAEMON_UNREACHABLE = "daemon_unreachable"

    # Over TCP only: who asks, and by which name.
    FORBIDDEN = "forbidden"
    HOST_REFUSED = "host_refused"
    UNAUTHORIZED = "unauthorized"

    ADDRESS_DIFFERS = "address_differs"
    APPLY_REFUSED = "apply_refused"
    APPLY_FAILED = "apply_failed"
    CONFLICT = "conflict"
    CARRY_FAILED = "carry_failed"
    OWNED = "owned"
    CONFIG_REFUSED = "config_refused"
    DAEMON_RUNNING = "daemon_running"
    ENGINE_UNPROVEN = "engine_unproven"
    INSECURE_DIRECTORY = "insecure_directory"
    OPERATION_IN_PROGRESS = "operation_in_progress"
    PORT_IN_USE = "port_in_use"
    REQUEST_EXPIRED = "request_expired"
    RESTART_REFUSED = "restart_refused"
    SHUTTING_DOWN = "shutting_down"
    SUPERSEDED = "superseded"

    # The engine's own reasons for declining a reconfigure, passed on verbatim.
    INVALID_GEOMETRY = "invalid_geometry"
    CACHE_TYPE_CHANGE = "cache_type_change"
    FAN_OUT_IN_PROGRESS = "fan_out_in_progress"
    RECONFIGURE_IN_PROGRESS = "reconfigure_in_progress"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    MEDIA_HELD = "media_held"
    ROPE_SCALING_CHANGE = "rope_scaling_change"
    PAGE_OUT_FAILED = "page_out_failed"
    CONTEXT_BUILD_FAILED = "context_build_failed"
    RECONFIGURE_REFUSED = "reconfigure_refused"

    # The engine's own reasons for declining a page verb, passed on verbatim; media_held is above.
    BAD_BODY = "bad_body"
    BAD_FILE = "bad_file"
    BAD_NAME = "bad_name"
    BAD_SLOT = "bad_slot"
    EMPTY_SLOT = "empty_slot"
    FILES_FAILED = "files_failed"
    NO_ACCESS = "no_access"
    NO_FILE = "no_file"
    NO_SPACE = "no_space"
    UNKNOWN_PAGE = "unknown_page"
    PAGE_CEILING = "page_ceiling"
    TOO_LARGE = "too_large"
    PAGE_MISMATCH = "page_mismatch"
    REQUEST_WAITING = "request_waiting"
    PAGE_FAILED = "page_failed"
    PAGE_REFUSED = "page_refused"

    # What this engine, started like this, does not do.
    NOT_SUPPORTED = "not_supported"

    REQUEST_TIMED_OUT = "request_timed_out"
    TIMED_OUT = "timed_out"
    START_STALLED = "start_stalled"

    CONTROL_SOCKET_GONE = "control_socket_gone"
    DAEMON_START_FAILED = "daemon_start_failed"
    ENGINE_ANSWER_BROKEN = "engine_answer_broken"
    ENGINE_EXITED = "engine_exited"
    ENGINE_SOCKET_GONE = "engine_socket_gone"
    ENGINE_SPAWN_FAILED = "engine_spawn_failed"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_WEDGED = "engine_wedged"
    FILE_UNREADABLE = "file_unreadable"
    HOLDER_LOST = "holder_lost"
    HOLDER_STOPPED = "holder_stopped"
    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    OTHER_VERSION = "other_version"
    OUT_OF_RESOURCES = "out_of_resources"
    STATE_UNREADABLE = "state_unreadable"
    STATE_UNWRITABLE = "state_unwritable"
    WORKING_DIRECTORY_GONE = "working_directory_gone"


UNANSWERED = frozenset(
    {Code.ENGINE_UNREACHABLE, Code.ENGINE_ANSWER_BROKEN, Code.ENGINE_SOCKET_GONE}
)
"""What an engine that ends looks like to whoever was asking it something: its end says why."""


class LlamactlError(Exception):
    """Base of all errors. Says what was tried, on what, and what came back.

    Attributes: `code` (a `Code` value, or an unknown string from a newer daemon), `message` (one
    line, complete by itself), `hint` (what to do next, or None), `details` (JSON-able facts).
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = str(code)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})


class InvalidRequestError(LlamactlError):
    """What was asked for makes no sense; nothing was tried."""

    exit_code = ExitCode.USAGE
    http_status = 400


class NotRunningError(LlamactlError):
    """There is no engine to do it to."""

    exit_code = ExitCode.NOT_RUNNING
    http_status = 409


class DaemonUnreachableError(LlamactlError):
    """Nothing answers on the control socket."""

    exit_code = ExitCode.UNREACHABLE
    http_status = 503


class RefusedError(LlamactlError):
    """Understood and declined; everything is as it was before."""

    exit_code = ExitCode.REFUSED
    http_status = 409


class TimedOutError(LlamactlError):
    """It did not happen in time."""

    exit_code = ExitCode.TIMED_OUT
    http_status = 504


class FailedError(LlamactlError):
    """It was tried and went wrong."""


_CLASSES: dict[Code, type[LlamactlError]] = {
    Code.INVALID_REQUEST: InvalidRequestError,
    Code.BODY_TOO_LARGE: InvalidRequestError,
    Code.METHOD_NOT_ALLOWED: InvalidRequestError,
    Code.UNSUPPORTED_MEDIA_TYPE: InvalidRequestError,
    Code.CONFIG_INVALID: InvalidRequestError,
    Code.CONFIG_INSECURE: InvalidRequestError,
    Code.MODEL_ELSEWHERE: InvalidRequestError,
    Code.OWNED_ARGUMENT: InvalidRequestError,
    Code.PATH_TOO_LONG: InvalidRequestError,
    Code.ENGINE_STOPPED: NotRunningError,
    Code.ENGINE_UNKNOWN: NotRunningError,
    Code.ENGINE_UNPATCHED: RefusedError,
    Code.NO_SPEC: NotRunningError,
    Code.DAEMON_UNREACHABLE: DaemonUnreachableError,
    Code.FORBIDDEN: RefusedError,
    Code.HOST_REFUSED: RefusedError,
    Code.UNAUTHORIZED: RefusedError,
    Code.ADDRESS_DIFFERS: RefusedError,
    Code.APPLY_REFUSED: RefusedError,
    Code.CONFLICT: RefusedError,
    Code.CARRY_FAILED: RefusedError,
    Code.OWNED: RefusedError,
    Code.CONFIG_REFUSED: RefusedError,
    Code.DAEMON_RUNNING: RefusedError,
    Code.ENGINE_UNPROVEN: RefusedError,
    Code.INSECURE_DIRECTORY: RefusedError,
    Code.OPERATION_IN_PROGRESS: RefusedError,
    Code.PORT_IN_USE: RefusedError,
    Code.REQUEST_EXPIRED: RefusedError,
    Code.RESTART_REFUSED: RefusedError,
    Code.SHUTTING_DOWN: RefusedError,
    Code.SUPERSEDED: RefusedError,
    Code.INVALID_GEOMETRY: RefusedError,
    Code.CACHE_TYPE_CHANGE: RefusedError,
    Code.FAN_OUT_IN_PROGRESS: RefusedError,
    Code.RECONFIGURE_IN_PROGRESS: RefusedError,
    Code.INSUFFICIENT_MEMORY: RefusedError,
    Code.MEDIA_HELD: RefusedError,
    Code.ROPE_SCALING_CHANGE: RefusedError,
    Code.PAGE_OUT_FAILED: RefusedError,
    Code.CONTEXT_BUILD_FAILED: RefusedError,
    Code.RECONFIGURE_REFUSED: RefusedError,
    Code.BAD_BODY: RefusedError,
    Code.BAD_FILE: RefusedError,
    Code.BAD_NAME: RefusedError,
    Code.BAD_SLOT: RefusedError,
    Code.EMPTY_SLOT: RefusedError,
    Code.NO_ACCESS: RefusedError,
    Code.NO_FILE: RefusedError,
    Code.NO_SPACE: RefusedError,
    Code.UNKNOWN_PAGE: RefusedError,
    Code.PAGE_CEILING: RefusedError,
    Code.TOO_LARGE: RefusedError,
    Code.PAGE_MISMATCH: RefusedError,
    Code.REQUEST_WAITING: RefusedError,
    Code.PAGE_FAILED: RefusedError,
    Code.PAGE_REFUSED: RefusedError,
    Code.NOT_SUPPORTED: RefusedError,
    Code.REQUEST_TIMED_OUT: TimedOutError,
    Code.TIMED_OUT: TimedOutError,
    Code.START_STALLED: TimedOutError,
    Code.APPLY_FAILED: FailedError,
    Code.CONTROL_SOCKET_GONE: FailedError,
    Code.DAEMON_START_FAILED: FailedError,
    Code.ENGINE_ANSWER_BROKEN: FailedError,
    Code.ENGINE_EXITED: FailedError,
    Code.ENGINE_SOCKET_GONE: FailedError,
    Code.ENGINE_SPAWN_FAILED: FailedError,
    Code.ENGINE_UNREACHABLE: FailedError,
    Code.ENGINE_WEDGED: FailedError,
    # Not refused: the new files may be in place, or come in place when the name is next read.
    Code.FILES_FAILED: FailedError,
    Code.FILE_UNREADABLE: FailedError,
    Code.HOLDER_LOST: FailedError,
    Code.HOLDER_STOPPED: FailedError,
    Code.INTERNAL: FailedError,
    Code.NOT_FOUND: FailedError,
    Code.OTHER_VERSION: FailedError,
    Code.OUT_OF_RESOURCES: FailedError,
    Code.STATE_UNREADABLE: FailedError,
    Code.STATE_UNWRITABLE: FailedError,
    Code.WORKING_DIRECTORY_GONE: FailedError,
}

# Where the HTTP status is finer than the class: the engine's own statuses, and a plain 404.
_STATUSES: dict[Code, int] = {
    Code.BODY_TOO_LARGE: 413,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.REQUEST_TIMED_OUT: 408,
    Code.FORBIDDEN: 403,
    Code.HOST_REFUSED: 421,
    Code.UNAUTHORIZED: 401,
    Code.INVALID_GEOMETRY: 400,
    Code.PAGE_OUT_FAILED: 500,
    Code.CONTEXT_BUILD_FAILED: 503,
    Code.BAD_BODY: 400,
    Code.BAD_FILE: 400,
    Code.BAD_NAME: 400,
    Code.BAD_SLOT: 400,
    Code.EMPTY_SLOT: 400,
    Code.NO_ACCESS: 500,
    Code.NO_FILE: 400,
    Code.NO_SPACE: 507,
    Code.NOT_SUPPORTED: 501,
    Code.UNKNOWN_PAGE: 404,
    Code.PAGE_CEILING: 503,
    Code.PAGE_FAILED: 500,
    Code.SHUTTING_DOWN: 503,
    Code.NOT_FOUND: 404,
}


def error(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> LlamactlError:
    """Return the error of the class that belongs to `code`; an unknown code is a `FailedError`."""
    known = code in Code.__members__.values()
    cls = _CLASSES[Code(code)] if known else FailedError
    return cls(code, message, hint=hint, details=details)


def http_status(exc: LlamactlError) -> int:
    """Return the status with which the control API reports `exc`."""
    known = exc.code in Code.__members__.values()
    return _STATUSES.get(Code(exc.code), exc.http_status) if known else exc.http_status
