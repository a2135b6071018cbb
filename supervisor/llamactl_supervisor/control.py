"""The control API: handlers only hand a command to the daemon and wait for what it says."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from llamactl_supervisor import asking, refusals
from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code, LlamactlError, error, http_status
from llamactl_supervisor.fields import validation_error
from llamactl_supervisor.models import (
    PROBLEM_TYPE,
    ApplyRequest,
    EngineLook,
    Ledger,
    Operation,
    OperationKind,
    PageDropRequest,
    PageFileRequest,
    PageRequest,
    Pages,
    PageSpillRequest,
    Problem,
    ReconfigureRequest,
    RestartRequest,
    RunningConfig,
    RunRequest,
    Slots,
    Status,
    UpRequest,
)
from llamactl_supervisor.snapshot import SERVING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from llamactl_supervisor.events import Command

WAIT_S_MAX = 60.0
LOG_LINES_MAX = 100_000
LEDGER_LINES_MAX = 10_000
LOCAL = "uid "
"""How a caller on the unix socket is named, as against one over TCP."""
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PLAIN = {"text/plain": {"schema": {"type": "string"}}}
_CODES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED}
"""Of what the router itself declines; its answer to another method names those in `Allow`."""
_DESCRIPTION = f"""\
Control of one llama-server. It is on a unix socket for its own user, and over TCP with a bearer
token where that is asked for. A mutation answers 202 with an operation, which goes on whoever hangs
up; `GET /v1/operations/{{operation_id}}?wait_s=60` waits for its end. One whose caller hangs up
before the 202 is not begun, nor one after the moment in its header `{asking.EXPIRES}` (seconds on
this machine's CLOCK_BOOTTIME).

Every error is a `Problem` (`{PROBLEM_TYPE}`). What went wrong after the 202 is the
operation's `error`, of the same shape. The codes, with their HTTP status:

"""


# It describes the token only: `guard` asks for it, before anything reaches the application.
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="Over TCP; not on the unix socket"
)


HANG_UP_S = 0.01
"""How much later than a request its caller's hanging up may be read, if it came right behind."""


async def _still_asked(request: Request) -> None:
    """Raise `request_expired` for a change that its caller has given up."""
    if request.method != "POST":
        return
    if (said := request.headers.get(asking.EXPIRES)) is not None:
        at = asking.parse(said)
        if (late := asking.expired(at)) is not None:
            raise late
        asking.expires_at.set(at)
    await request.body()
    await asyncio.sleep(HANG_UP_S)
    if await request.is_disconnected():
        raise asking.abandoned()


def _in_utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError("is before the year 1 or after the year 9999 in UTC") from None


def _spelled(pattern: str, what: str) -> BeforeValidator:
    """Return what refuses other spellings: a query is text, and pydantic guesses at it."""

    def check(text: object) -> object:
        if isinstance(text, str) and re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("spelling", "{text}", {"text": f"must be {what}"})
        return text

    return BeforeValidator(check)


Since = Annotated[
    AwareDatetime, AfterValidator(_in_utc), _spelled(".*[-:].*", "a time as 2026-01-31T12:00:00Z")
]
"""A time with its zone, taken to UTC."""
Flag = Annotated[bool, _spelled("true|false", "true or false")]
_INTEGER = _spelled("-?[0-9]{1,18}", "an integer")
_NUMBER = _spelled(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", "a number")


class Supervisor(Protocol):
    """The daemon, as far as the API sees it."""

    async def submit(
        self, kind: OperationKind, by: str, command: Callable[[str], Command]
    ) -> Operation:
        """Hand in a command; return its operation, or raise why it is not accepted."""

    async def apply(self, by: str, asked: ApplyRequest) -> Operation:
        """Bring the engine to what is asked for; return the operation, or raise why not."""

    async def wait(self, operation: str, wait_s: float) -> Operation:
        """Return the operation at its end or after `wait_s` seconds."""

    def status(self) -> Status:
        """Return everything that is known."""

    def config(self) -> RunningConfig:
        """Return the configuration as it was read, and as it is in force."""

    async def pages(self) -> Pages:
        """Return the engine's pages, or raise why it cannot be asked."""

    async def slots(self) -> Slots:
        """Return the engine's slots, or raise why it cannot be asked."""

    async def look(self) -> EngineLook:
        """Return what the engine holds, or raise why it cannot be asked."""

    async def ledger(self, since: datetime | None, limit: int) -> Ledger:
        """Return the newest lines of the ledger, or raise why it cannot be read."""

    async def metrics(self) -> bytes:
        """Return the metrics text."""

    def run_engine(self, asked: RunRequest, pid: int) -> AsyncIterator[bytes]:
        """Yield what a run is told, until its end or the caller's."""

    def log_lines(
        self, count: int, *, follow: bool, since: datetime | None, run: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the engine's log."""


def create_app(daemon: Supervisor, version: str) -> FastAPI:
    """Return the application; `/openapi.json` describes it."""
    codes = "\n".join(f"- `{code}` {http_status(error(code, ''))}" for code in Code)
    app = FastAPI(
        title="llamactl",
        version=version,
        description=_DESCRIPTION + codes,
        dependencies=[Depends(_BEARER), Depends(_still_asked)],
        docs_url=None,
        redoc_url=None,
    )
    _errors(app)
    _mutations(app, daemon)
    _runs(app, daemon)
    _config(app, daemon)
    _pages(app, daemon)
    _page_files(app, daemon)
    _reads(app, daemon)
    _probes(app, daemon)
    return app


def create_probes(daemon: Supervisor) -> FastAPI:
    """Return what a listener without a token serves: three reads without anybody's data."""
    app = FastAPI(openapi_url=None)
    _errors(app)
    _probes(app, daemon)
    return app


def _accepted(*codes: Code) -> dict[str, Any]:
    """Return how a route is described that answers with an operation, or declines with these."""
    return {"status_code": 202, "responses": refusals.described(*refusals.ACCEPTED, *codes)}


def _mutations(app: FastAPI, daemon: Supervisor) -> None:
    @app.post(
        "/v1/up",
        **_accepted(*refusals.ENGINE, Code.OWNED, Code.CONFLICT, Code.OPERATION_IN_PROGRESS),
    )
    async def up(body: UpRequest, request: Request, exact: Flag = False) -> Operation:
        """Run this engine. The same request again succeeds as `already_up`.

        That is so with another geometry that was set live as well, unless the one in the request
        is asked for as `exact`.
        """
        by = _who(request)
        return await daemon.submit(OperationKind.UP, by, lambda op: ev.Up(op, body, exact))

    @app.post("/v1/start", **_accepted(Code.NO_SPEC, Code.OPERATION_IN_PROGRESS))
    async def start(request: Request) -> Operation:
        """Run the engine that was last asked for."""
        return await daemon.submit(OperationKind.START, _who(request), ev.Start)

    @app.post("/v1/stop", **_accepted(Code.OWNED))
    async def stop(request: Request, now: bool = False) -> Operation:
        """Stop the engine; its conversations go into files, and into the next engine.

        One that belongs to a run is stopped `now`, or that is declined. One that is being stopped
        is `now` not waited for any longer: what is not in files by then is lost.
        """
        by = _who(request)
        return await daemon.submit(OperationKind.STOP, by, lambda op: ev.Stop(op, now))

    @app.post(
        "/v1/restart", **_accepted(Code.NO_SPEC, Code.OPERATION_IN_PROGRESS, Code.RESTART_REFUSED)
    )
    async def restart(request: Request, body: RestartRequest | None = None) -> Operation:
        """Stop the engine and load it again; its conversations are carried over.

        One that cannot be kept refuses it (`carry_failed`), unless the loss is accepted.
        """
        lossy, kind = body is not None and body.accept_loss, OperationKind.RESTART
        return await daemon.submit(kind, _who(request), lambda op: ev.Restart(op, lossy))

    @app.post("/v1/down", **_accepted())
    async def down(request: Request, now: bool = False) -> Operation:
        """Stop the engine, then the daemon; `now` as with `stop`."""
        by = _who(request)
        return await daemon.submit(OperationKind.DOWN, by, lambda op: ev.Down(op, now))

    @app.post("/v1/reconfigure", **_accepted(*refusals.GEOMETRY, *refusals.NOT_SERVING))
    async def reconfigure(body: ReconfigureRequest, request: Request) -> Operation:
        """Change the live geometry; the operation's result is the engine's receipt."""
        kind = OperationKind.RECONFIGURE
        return await daemon.submit(kind, _who(request), lambda op: ev.Reconfigure(op, body))


def _runs(app: FastAPI, daemon: Supervisor) -> None:
    @app.post(
        "/v1/run",
        response_class=StreamingResponse,
        responses=refusals.described(*refusals.POSTED, *refusals.ENGINE),
    )
    async def run(body: RunRequest, request: Request) -> StreamingResponse:
        """Be the engine's owner for as long as the answer is listened to.

        The answer has a `RunMessage` in each line. Not over TCP: who hangs up must be known.
        """
        if request.client is None or not request.client.host.startswith(LOCAL):
            raise error(Code.FORBIDDEN, "a run is for callers on the unix socket")
        said = daemon.run_engine(body, request.client.port)
        return StreamingResponse(said, media_type="application/x-ndjson")


def _config(app: FastAPI, daemon: Supervisor) -> None:
    @app.post(
        "/v1/apply",
        **_accepted(*refusals.ENGINE, Code.APPLY_REFUSED, Code.NO_SPEC, Code.OPERATION_IN_PROGRESS),
    )
    async def apply(body: ApplyRequest, request: Request) -> Operation:
        """Bring the engine to this, live where that is possible, else by a relaunch.

        Applies that come while a change is under way are carried out together after it, each on
        top of those before. One of which newer ones set every field ends as `superseded`. The
        operation's result has the plan; with `dry_run` that is all.
        """
        return await daemon.apply(_who(request), body)

    @app.post("/v1/reload", **_accepted())
    async def reload(request: Request) -> Operation:
        """Read the configuration again; the operation's result says what came into force."""
        return await daemon.submit(OperationKind.RELOAD, _who(request), ev.Reload)


def _pages(app: FastAPI, daemon: Supervisor) -> None:
    """What only the engine knows or does: not the daemon's state, and in the engine's order."""

    async def submit(kind: OperationKind, request: Request, name: str, slot: int = 0) -> Operation:
        return await daemon.submit(kind, _who(request), lambda op: ev.Page(op, kind, name, slot))

    # The name is in the body: a path loses `..` and line ends on its way, and names another page.
    @app.post("/v1/pages/out", **_accepted(*refusals.GEOMETRY, *refusals.NOT_SERVING))
    async def page_out(body: PageRequest, request: Request) -> Operation:
        """Take the slot's conversation out into host memory; waits until the slot is free."""
        return await submit(OperationKind.PAGE_OUT, request, body.name, body.slot)

    @app.post("/v1/pages/in", **_accepted(*refusals.GEOMETRY, *refusals.NOT_SERVING))
    async def page_in(body: PageRequest, request: Request) -> Operation:
        """Put the page into the slot, in place of what it holds; waits until the slot is free."""
        return await submit(OperationKind.PAGE_IN, request, body.name, body.slot)

    @app.post("/v1/pages/drop", **_accepted(*refusals.NOT_SERVING))
    async def page_drop(body: PageDropRequest, request: Request) -> Operation:
        """Free the page; or remove what the engine did not take, by the name of its file."""
        return await submit(OperationKind.PAGE_DROP, request, body.name)

    # As the engine gave them: nothing is added that it did not say.
    @app.get(
        "/v1/pages",
        responses=refusals.described(*refusals.ASKED),
        response_model_exclude_unset=True,
    )
    async def pages() -> Pages:
        """The pages, parked ones among them, and what files hold that the engine did not take.

        A sleeping engine sleeps on.
        """
        return await daemon.pages()

    @app.get(
        "/v1/slots",
        responses=refusals.described(*refusals.ASKED),
        response_model_exclude_unset=True,
    )
    async def slots() -> Slots:
        """The slots, then the parked ones. Wakes a sleeping engine, which loads its weights."""
        return await daemon.slots()

    @app.get(
        "/v1/engine",
        responses=refusals.described(*refusals.ASKED),
        response_model_exclude_unset=True,
    )
    async def look() -> EngineLook:
        """Slots and pages, without waking the engine and without waiting for a long batch."""
        return await daemon.look()


def _page_files(app: FastAPI, daemon: Supervisor) -> None:
    """The page verbs with files. What their names may be, the engine says."""

    async def submit(
        kind: OperationKind,
        request: Request,
        filename: str,
        slot: int = 0,
        spilled: PageSpillRequest | None = None,
    ) -> Operation:
        page, drop = (None, False) if spilled is None else (spilled.name, spilled.drop)
        return await daemon.submit(
            kind, _who(request), lambda op: ev.PageFile(op, kind, filename, slot, page, drop)
        )

    @app.post("/v1/pages/spill", **_accepted(*refusals.NOT_SERVING))
    async def page_spill(body: PageSpillRequest, request: Request) -> Operation:
        """Write the page to files, beside decoding; `drop` frees it once they are there."""
        filename = body.name if body.filename is None else body.filename
        return await submit(OperationKind.PAGE_SPILL, request, filename, spilled=body)

    @app.post("/v1/pages/save", **_accepted(*refusals.GEOMETRY, *refusals.NOT_SERVING))
    async def page_save(body: PageFileRequest, request: Request) -> Operation:
        """Write the slot's conversation to files; it stays. Waits until the slot is free."""
        return await submit(OperationKind.PAGE_SAVE, request, body.filename, body.slot)

    @app.post("/v1/pages/restore", **_accepted(*refusals.GEOMETRY, *refusals.NOT_SERVING))
    async def page_restore(body: PageFileRequest, request: Request) -> Operation:
        """Read the files into the slot, in place of what it holds; waits until it is free."""
        return await submit(OperationKind.PAGE_RESTORE, request, body.filename, body.slot)


def _reads(app: FastAPI, daemon: Supervisor) -> None:
    @app.get("/v1/config", responses=refusals.described())
    async def config() -> RunningConfig:
        """Every key of the configuration: what the daemon has read, and what is in force."""
        return daemon.config()

    @app.get("/v1/status", responses=refusals.described())
    async def status() -> Status:
        """Everything the daemon knows."""
        return daemon.status()

    @app.get(
        "/v1/operations/{operation_id}",
        responses=refusals.described(Code.NOT_FOUND, Code.SHUTTING_DOWN),
    )
    async def operation(
        operation_id: str, wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX), _NUMBER] = 0.0
    ) -> Operation:
        """One operation, at its end or after `wait_s` seconds."""
        return await daemon.wait(operation_id, wait_s)

    @app.get("/v1/ledger", responses=refusals.described(Code.STATE_UNREADABLE))
    async def ledger(
        since: Since | None = None,
        limit: Annotated[int, Query(ge=0, le=LEDGER_LINES_MAX), _INTEGER] = LEDGER_LINES_MAX,
    ) -> Ledger:
        """Weight loads and loads avoided since then, the newest last; the sums are over all."""
        return await daemon.ledger(since, limit)

    @app.get(
        "/v1/logs", response_class=PlainTextResponse, responses=refusals.described(Code.NOT_FOUND)
    )
    async def logs(
        lines: Annotated[int, Query(ge=0, le=LOG_LINES_MAX), _INTEGER] = 200,
        follow: Flag = False,
        since: Since | None = None,
        run: str | None = None,
    ) -> StreamingResponse:
        """The engine's last lines: UTC time, stream, text. `follow` goes on with new ones.

        A follower with `run` is done when that run is, and has all of its lines by then.
        """
        text = daemon.log_lines(lines, follow=follow, since=since, run=run)
        return StreamingResponse(text, media_type="text/plain; charset=utf-8")


def _probes(app: FastAPI, daemon: Supervisor) -> None:
    not_ready = {"content": _PLAIN, "description": "The state"}

    @app.get("/livez", response_class=PlainTextResponse, responses=refusals.described())
    async def livez() -> str:
        """The daemon's loop turns."""
        return "ok\n"

    @app.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses=refusals.described() | {503: not_ready},
    )
    async def readyz() -> PlainTextResponse:
        """The engine serves; a reconfigure does not interrupt that."""
        state = daemon.status().state
        return PlainTextResponse(f"{state}\n", status_code=200 if state in SERVING else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=refusals.described())
    async def metrics() -> Response:
        """Prometheus metrics of the daemon and, if it answers in time, of the engine."""
        return Response(await daemon.metrics(), media_type=EXPOSITION_TYPE)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(LlamactlError)
    async def ours(_: Request, exc: LlamactlError) -> JSONResponse:
        return problem_response(exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> JSONResponse:
        if isinstance(exc.body, bytes):  # it was not read: its type is not JSON
            sent = request.headers.get("content-type", "")
            message = f"{request.url.path}: a body of type {sent!r} cannot be read"
            hint = "send JSON, with Content-Type: application/json"
            return problem_response(error(Code.UNSUPPORTED_MEDIA_TYPE, message, hint=hint))
        return _problem(Problem.of(validation_error(exc.errors())), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, exc: HTTPException) -> JSONResponse:
        code = _CODES.get(exc.status_code, Code.INVALID_REQUEST)
        message = f"{request.method} {request.url.path}: {exc.detail}"
        answer = _problem(Problem(code=code, message=message), exc.status_code)
        answer.headers.update(exc.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {type(exc).__name__} in the daemon"
        problem = Problem(code=Code.INTERNAL, message=message, hint="see the daemon's log")
        return _problem(problem, 500)


def problem_response(exc: LlamactlError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer that reports `exc`."""
    answer = _problem(Problem.of(exc), http_status(exc))
    answer.headers.update(headers or {})
    return answer


def _problem(problem: Problem, status: int) -> JSONResponse:
    body = problem.model_dump(mode="json")
    return JSONResponse(body, status_code=status, media_type=PROBLEM_TYPE)


def _who(request: Request) -> str:
    return "unknown" if request.client is None else request.client.host
