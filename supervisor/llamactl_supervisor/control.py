"""The control API: handlers only hand a command to the daemon and wait for what it says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import AfterValidator, AwareDatetime
from starlette.exceptions import HTTPException

from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code, LlamactlError, error, http_status
from llamactl_supervisor.fields import validation_error
from llamactl_supervisor.models import (
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
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROBLEM_TYPE = "application/problem+json"
_PROBLEM = {PROBLEM_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": _PROBLEM, "description": "Declined; `code` says why"},
    "5XX": {"content": _PROBLEM, "description": "Went wrong; `code` says how"},
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The state"}
}
_DESCRIPTION = f"""\
Control of one llama-server. It is on a unix socket for its own user, and over TCP with a bearer
token where that is asked for. A mutation answers 202 with an operation, which goes on whoever hangs
up; `GET /v1/operations/{{operation_id}}?wait_s=60` waits for its end.

Every error is a `Problem` (`{PROBLEM_TYPE}`). What went wrong after the 202 is the
operation's `error`, of the same shape. The codes, with their HTTP status:

"""


# It describes the token only: `guard` asks for it, before anything reaches the application.
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="Over TCP; not on the unix socket"
)


def _in_utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError("is before the year 1 or after the year 9999 in UTC") from None


Since = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time with its zone, taken to UTC."""


class Supervisor(Protocol):
    """The daemon, as far as the API sees it."""

    async def submit(
        self, kind: OperationKind, by: str, command: Callable[[str], Command]
    ) -> Operation:
        """Hand in a command; return its operation, or raise why it is not accepted."""

    async def wait(self, operation: str, wait_s: float) -> Operation:
        """Return the operation at its end or after `wait_s` seconds."""

    def status(self) -> Status:
        """Return everything that is known."""

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

    def log_lines(
        self, count: int, *, follow: bool, since: datetime | None
    ) -> AsyncIterator[bytes]:
        """Yield the engine's log."""


def create_app(daemon: Supervisor, version: str) -> FastAPI:
    """Return the application; `/openapi.json` describes it."""
    codes = "\n".join(f"- `{code}` {http_status(error(code, ''))}" for code in Code)
    app = FastAPI(
        title="llamactl",
        version=version,
        description=_DESCRIPTION + codes,
        dependencies=[Depends(_BEARER)],
        docs_url=None,
        redoc_url=None,
    )
    _errors(app)
    _mutations(app, daemon)
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


def _mutations(app: FastAPI, daemon: Supervisor) -> None:
    accepted: dict[str, Any] = {"status_code": 202, "responses": _PROBLEMS}

    @app.post("/v1/up", **accepted)
    async def up(body: UpRequest, request: Request, exact: bool = False) -> Operation:
        """Run this engine. The same request again succeeds as `already_up`.

        That is so with another geometry that was set live as well, unless the one in the request
        is asked for as `exact`.
        """
        by = _who(request)
        return await daemon.submit(OperationKind.UP, by, lambda op: ev.Up(op, body, exact))

    @app.post("/v1/start", **accepted)
    async def start(request: Request) -> Operation:
        """Run the engine that was last asked for."""
        return await daemon.submit(OperationKind.START, _who(request), ev.Start)

    @app.post("/v1/stop", **accepted)
    async def stop(request: Request) -> Operation:
        """Stop the engine."""
        return await daemon.submit(OperationKind.STOP, _who(request), ev.Stop)

    @app.post("/v1/restart", **accepted)
    async def restart(request: Request) -> Operation:
        """Stop the engine and load it again."""
        return await daemon.submit(OperationKind.RESTART, _who(request), ev.Restart)

    @app.post("/v1/down", **accepted)
    async def down(request: Request) -> Operation:
        """Stop the engine, then the daemon."""
        return await daemon.submit(OperationKind.DOWN, _who(request), ev.Down)

    @app.post("/v1/reconfigure", **accepted)
    async def reconfigure(body: ReconfigureRequest, request: Request) -> Operation:
        """Change the live geometry; the operation's result is the engine's receipt."""
        kind = OperationKind.RECONFIGURE
        return await daemon.submit(kind, _who(request), lambda op: ev.Reconfigure(op, body))


def _config(app: FastAPI, daemon: Supervisor) -> None:
    @app.post("/v1/reload", status_code=202, responses=_PROBLEMS)
    async def reload(request: Request) -> Operation:
        """Read the configuration again; the operation's result says what came into force."""
        return await daemon.submit(OperationKind.RELOAD, _who(request), ev.Reload)


def _pages(app: FastAPI, daemon: Supervisor) -> None:
    """What only the engine knows or does: not the daemon's state, and in the engine's order."""
    accepted: dict[str, Any] = {"status_code": 202, "responses": _PROBLEMS}

    async def submit(kind: OperationKind, request: Request, name: str, slot: int = 0) -> Operation:
        return await daemon.submit(kind, _who(request), lambda op: ev.Page(op, kind, name, slot))

    # The name is in the body: a path loses `..` and line ends on its way, and names another page.
    @app.post("/v1/pages/out", **accepted)
    async def page_out(body: PageRequest, request: Request) -> Operation:
        """Take the slot's conversation out into host memory; waits until the slot is free."""
        return await submit(OperationKind.PAGE_OUT, request, body.name, body.slot)

    @app.post("/v1/pages/in", **accepted)
    async def page_in(body: PageRequest, request: Request) -> Operation:
        """Put the page into the slot, in place of what it holds; waits until the slot is free."""
        return await submit(OperationKind.PAGE_IN, request, body.name, body.slot)

    @app.post("/v1/pages/drop", **accepted)
    async def page_drop(body: PageDropRequest, request: Request) -> Operation:
        """Free the page."""
        return await submit(OperationKind.PAGE_DROP, request, body.name)

    # As the engine gave them: nothing is added that it did not say.
    @app.get("/v1/pages", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def pages() -> Pages:
        """The pages, parked conversations among them. A sleeping engine sleeps on."""
        return await daemon.pages()

    @app.get("/v1/slots", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def slots() -> Slots:
        """The slots, then the parked ones. Wakes a sleeping engine, which loads its weights."""
        return await daemon.slots()

    @app.get("/v1/engine", responses=_PROBLEMS, response_model_exclude_unset=True)
    async def look() -> EngineLook:
        """Slots and pages, without waking the engine and without waiting for a long batch."""
        return await daemon.look()


def _page_files(app: FastAPI, daemon: Supervisor) -> None:
    """The page verbs with files. What their names may be, the engine says."""
    accepted: dict[str, Any] = {"status_code": 202, "responses": _PROBLEMS}

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

    @app.post("/v1/pages/spill", **accepted)
    async def page_spill(body: PageSpillRequest, request: Request) -> Operation:
        """Write the page to files, beside decoding; `drop` frees it once they are there."""
        filename = body.name if body.filename is None else body.filename
        return await submit(OperationKind.PAGE_SPILL, request, filename, spilled=body)

    @app.post("/v1/pages/save", **accepted)
    async def page_save(body: PageFileRequest, request: Request) -> Operation:
        """Write the slot's conversation to files; it stays. Waits until the slot is free."""
        return await submit(OperationKind.PAGE_SAVE, request, body.filename, body.slot)

    @app.post("/v1/pages/restore", **accepted)
    async def page_restore(body: PageFileRequest, request: Request) -> Operation:
        """Read the files into the slot, in place of what it holds; waits until it is free."""
        return await submit(OperationKind.PAGE_RESTORE, request, body.filename, body.slot)


def _reads(app: FastAPI, daemon: Supervisor) -> None:
    @app.get("/v1/status", responses=_PROBLEMS)
    async def status() -> Status:
        """Everything the daemon knows."""
        return daemon.status()

    @app.get("/v1/operations/{operation_id}", responses=_PROBLEMS)
    async def operation(
        operation_id: str, wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0
    ) -> Operation:
        """One operation, at its end or after `wait_s` seconds."""
        return await daemon.wait(operation_id, wait_s)

    @app.get("/v1/ledger", responses=_PROBLEMS)
    async def ledger(
        since: Since | None = None,
        limit: Annotated[int, Query(ge=0, le=LEDGER_LINES_MAX)] = LEDGER_LINES_MAX,
    ) -> Ledger:
        """Weight loads and loads avoided since then, the newest last; the sums are over all."""
        return await daemon.ledger(since, limit)

    @app.get("/v1/logs", response_class=PlainTextResponse, responses=_PROBLEMS)
    async def logs(
        lines: Annotated[int, Query(ge=0, le=LOG_LINES_MAX)] = 200,
        follow: bool = False,
        since: Since | None = None,
    ) -> StreamingResponse:
        """The engine's last lines: UTC time, stream, text. `follow` goes on with new ones."""
        text = daemon.log_lines(lines, follow=follow, since=since)
        return StreamingResponse(text, media_type="text/plain; charset=utf-8")


def _probes(app: FastAPI, daemon: Supervisor) -> None:
    @app.get("/livez", response_class=PlainTextResponse, responses=_PROBLEMS)
    async def livez() -> str:
        """The daemon's loop turns."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse, responses=_PROBLEMS | _NOT_READY)
    async def readyz() -> PlainTextResponse:
        """The engine serves; a reconfigure does not interrupt that."""
        state = daemon.status().state
        return PlainTextResponse(f"{state}\n", status_code=200 if state in SERVING else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_PROBLEMS)
    async def metrics() -> Response:
        """Prometheus metrics of the daemon and, if it answers in time, of the engine."""
        return Response(await daemon.metrics(), media_type=EXPOSITION_TYPE)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(LlamactlError)
    async def ours(_: Request, exc: LlamactlError) -> JSONResponse:
        return problem_response(exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, exc: RequestValidationError) -> JSONResponse:
        return _problem(Problem.of(validation_error(exc.errors())), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, exc: HTTPException) -> JSONResponse:
        code = Code.NOT_FOUND if exc.status_code == 404 else Code.INVALID_REQUEST
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
