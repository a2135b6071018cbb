"""The engine over its private socket: health, properties, reconfigure, pages, metrics."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.events import EngineFacts
from llamactl_supervisor.hold import Hold
from llamactl_supervisor.models import (
    ENGINE_READ_S,
    EngineLook,
    FileReceipt,
    Geometry,
    OperationKind,
    Page,
    PageReceipt,
    Pages,
    Problem,
    Quiet,
    Receipt,
    Slots,
    SlotState,
)
from llamactl_supervisor.progress import ANSWER_S, Answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamactl_supervisor import events as ev
    from llamactl_supervisor.events import EngineProcess
    from llamactl_supervisor.models import ReconfigureRequest

LOOK_S = 0.5
"""How long a look waits for the slots: the engine says them between two batches."""
ANSWER_BYTES_MAX = 8 * 2**20
"""More than this is not an answer of llama-server."""
NOBODY_LISTENS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED})
"""Why there is no connection to a path that is gone or that no socket is bound to."""
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Why this process cannot ask: no word about the engine."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _ComputeProgress(_Document):
    n_ubatches: int
    is_working: bool


class _Props(_Document):
    instance_id: str
    context_geometry: Geometry | None = None
    n_weight_loads: int | None = None
    last_reconfigure: Receipt | None = None
    is_sleeping: bool = False
    is_quiet: bool | None = None
    endpoint_slots: bool = True
    compute_progress: _ComputeProgress | None = None


class _Refusal(_Document):
    reason: str
    message: str
    details: dict[str, Any] = {}


class _Unsupported(_Document):
    type: Literal["not_supported_error"]
    message: str


class _Refused(_Document):
    error: _Refusal | _Unsupported


_Shape = TypeVar("_Shape")
_PageShape = TypeVar("_PageShape", PageReceipt, FileReceipt)

_FILE_ACTIONS = {
    OperationKind.PAGE_SPILL: "spill",
    OperationKind.PAGE_SAVE: "save",
    OperationKind.PAGE_RESTORE: "restore",
}

_PAGES = TypeAdapter(tuple[Page, ...])
_SLOTS = TypeAdapter(tuple[SlotState, ...])


class EngineClient:
    """Talks to one proven process: every answer must come from its pid (SO_PEERCRED)."""

    def __init__(self, process: EngineProcess, path: Path, api_key: str | None) -> None:
        self.process = process
        self._path, self._hold = path, Hold(path)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            # As many connections as there are calls: one that waits for its slot, or for the
            # engine's turn, keeps no other from being sent.
            transport=httpx.AsyncHTTPTransport(
                uds=self._hold.path, limits=httpx.Limits(max_connections=None)
            ),
            base_url="http://engine",
            headers=headers,
            timeout=ANSWER_S,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections; a second time there are none."""
        if not self._http.is_closed:
            await self._http.aclose()
            self._hold.close()

    def has_name(self) -> bool:
        """Say whether the socket is still where others look for it."""
        return self._hold.look()

    async def facts(self) -> EngineFacts | None:
        """Return what the engine says about itself, or None while it is not healthy.

        Not healthy: it loads, or it does not answer in time. Raises `engine_socket_gone` where
        nobody listens (yet), `engine_unproven` when somebody else answers, `engine_answer_broken`
        when the answer is none of llama-server's, `out_of_resources` when it cannot be asked.
        """
        try:
            status, _ = await self._ask("GET", "/health", timeout_s=ANSWER_S)
            return await self.props() if status == httpx.codes.OK else None
        except LlamactlError as exc:
            if exc.code == Code.ENGINE_UNREACHABLE:
                return None
            raise

    async def props(self) -> EngineFacts:
        """Return the live geometry and the weight loads. Disturbs nothing, wakes nothing."""
        props = await self._props()
        work = props.compute_progress
        return EngineFacts(
            props.context_geometry,
            props.n_weight_loads,
            props.last_reconfigure,
            Answer(
                n_ubatches=None if work is None else work.n_ubatches,
                is_working=None if work is None else work.is_working,
                is_sleeping=props.is_sleeping,
            ),
            is_quiet=props.is_quiet,
        )

    async def _props(self) -> _Props:
        status, body = await self._ask("GET", "/props", timeout_s=ANSWER_S)
        props = self._read(_Props.model_validate_json, "/props", status, body)
        if props.instance_id != self.process.instance_id:
            raise error(
                Code.ENGINE_UNPROVEN,
                f"{self._path} answers as instance {props.instance_id}, "
                f"not as {self.process.instance_id}",
            )
        return props

    async def reconfigure(self, change: ReconfigureRequest) -> Receipt:
        """Ask for another geometry; waits as long as the engine's next safe point takes.

        Raises the engine's own reason as code, with its details, when it declines.
        """
        wanted = change.model_dump(mode="json", exclude_none=True)
        status, body = await self._ask("POST", "/reconfigure", timeout_s=None, json=wanted)
        if status == httpx.codes.OK:
            return self._read(Receipt.model_validate_json, "/reconfigure", status, body)
        raise self._declined(Code.RECONFIGURE_REFUSED, "/reconfigure", status, body)

    async def quiesce(self, *, is_quiet: bool, cut: bool = False, timeout_s: float) -> Quiet | None:
        """Have requests wait, or go on again; `cut` ends those in progress, state kept.

        None: an engine that does not know this. Raises `engine_unreachable` without an answer
        within `timeout_s`: it comes between two batches.
        """
        path, wanted = "/quiesce", {"is_quiet": is_quiet} | ({"cut": True} if cut else {})
        status, body = await self._ask("POST", path, timeout_s=timeout_s, json=wanted)
        if status == httpx.codes.NOT_FOUND:
            return None
        if status == httpx.codes.OK:
            return self._read(Quiet.model_validate_json, path, status, body)
        raise self._declined(Code.NOT_SUPPORTED, path, status, body)

    async def erase(self, slot: int, *, timeout_s: float) -> None:
        """Forget what the slot holds. Raises the engine's own reason when it declines."""
        path, query = f"/slots/{slot}", {"action": "erase"}
        status, body = await self._ask("POST", path, timeout_s=timeout_s, query=query)
        if status != httpx.codes.OK:
            raise self._declined(Code.PAGE_REFUSED, path, status, body)

    async def page(self, command: ev.Page) -> PageReceipt:
        """Take a page out of a slot, into one, or drop it; waits as long as the slot is busy.

        Wakes a sleeping engine. Raises the engine's own reason as code when it declines.
        """
        query = {"action": command.kind.value, "page": command.name}
        wanted = None if command.home is None else {"home": command.home}
        return await self._page(PageReceipt, command.slot, query, wanted)

    async def page_file(self, command: ev.PageFile) -> FileReceipt:
        """Write a page or a slot to files, or read them into a slot; waits and raises likewise."""
        query = {"action": _FILE_ACTIONS[command.kind]}
        wanted: dict[str, str | bool] = {"filename": command.filename}
        if command.page is not None:
            query["page"] = command.page
            wanted["drop"] = command.drop
        return await self._page(FileReceipt, command.slot, query, wanted)

    async def pages(self) -> Pages:
        """Return the pages. Wakes nothing."""
        status, body = await self._ask_in_time("/pages")
        if status != httpx.codes.OK:
            raise self._declined(Code.NOT_SUPPORTED, "/pages", status, body)
        return Pages(pages=self._read(_PAGES.validate_json, "/pages", status, body))

    async def slots(self) -> Slots:
        """Return the slots and the parked ones. Wakes a sleeping engine, if it will say them."""
        props = await self._props()
        if not props.endpoint_slots:
            message = "this engine does not say its slots: it was started with --no-slots"
            raise error(Code.NOT_SUPPORTED, message)
        status, body = await self._ask_in_time("/slots")
        if status != httpx.codes.OK:
            raise self._declined(Code.NOT_SUPPORTED, "/slots", status, body)
        return Slots(slots=self._read(_SLOTS.validate_json, "/slots", status, body))

    async def look(self) -> EngineLook:
        """Return what it holds. A sleeping engine sleeps on; a busy one may not say its slots."""
        asleep = (await self._props()).is_sleeping
        look = EngineLook(asleep=asleep, slots=None, pages=(await self.pages()).pages)
        if asleep:
            return look
        try:
            status, body = await self._ask("GET", "/slots", timeout_s=LOOK_S)
            if status != httpx.codes.OK:
                raise self._declined(Code.NOT_SUPPORTED, "/slots", status, body)
            slots = self._read(_SLOTS.validate_json, "/slots", status, body)
        except LlamactlError as exc:
            return look.model_copy(update={"problem": Problem.of(exc)})
        return look.model_copy(update={"slots": tuple(map(_bare, slots))})

    async def metrics(self) -> bytes:
        """Return the Prometheus exposition. Wakes nothing, but begins its averages anew."""
        status, body = await self._ask("GET", "/metrics", timeout_s=ANSWER_S)
        if status != httpx.codes.OK:
            raise self._broken("/metrics", status, body)
        return body

    async def _page(
        self, shape: type[_PageShape], slot: int, query: dict[str, str], wanted: object = None
    ) -> _PageShape:
        path = f"/slots/{slot}"
        status, body = await self._ask("POST", path, timeout_s=None, query=query, json=wanted)
        if status == httpx.codes.OK:
            return self._read(shape.model_validate_json, path, status, body)
        raise self._declined(Code.PAGE_REFUSED, path, status, body)

    async def _ask_in_time(self, path: str) -> tuple[int, bytes]:
        """Ask for what may wait for a batch or a wake. Raises `timed_out` as well."""
        try:
            return await self._ask("GET", path, timeout_s=ENGINE_READ_S)
        except LlamactlError as exc:
            if not isinstance(exc.__cause__, httpx.ReadTimeout):
                raise
            raise _late(path, ENGINE_READ_S) from exc

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None,
        json: object = None,
        query: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body.

        Raises `engine_unreachable` without an answer in time, `engine_socket_gone` where nobody
        listens, and `out_of_resources` when the reason is this process's own.
        """
        if self._http.is_closed:
            pid = self.process.engine.pid
            raise error(Code.ENGINE_UNREACHABLE, f"the engine is gone (pid {pid})")
        self._hold.look()
        body = bytearray()
        try:
            timeout = httpx.Timeout(ANSWER_S, read=timeout_s)
            request = self._http.stream(method, path, params=query, json=json, timeout=timeout)
            async with request as answer:
                self._prove(answer)
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        raise self._broken(path, answer.status_code, bytes(body))
                return answer.status_code, bytes(body)
        except (httpx.RemoteProtocolError, httpx.DecodingError) as exc:
            raise error(
                Code.ENGINE_ANSWER_BROKEN, f"{method} {path}: no HTTP from the engine: {exc}"
            ) from exc
        except (httpx.TransportError, OSError) as exc:
            raise self._unanswered(f"{method} {path}", exc) from exc

    def _unanswered(self, question: str, exc: BaseException) -> LlamactlError:
        """Return why there is no answer: only a connection that was made says more of the engine.

        A queue of connections that is full is the engine's doing as well: nobody takes them.
        """
        number, what = _errno(exc), str(exc) or type(exc).__name__
        if number in OUT_OF_RESOURCES:
            return error(
                Code.OUT_OF_RESOURCES,
                f"{question}: the daemon cannot ask the engine: {os.strerror(number)}",
                hint="raise the limit of open files (LimitNOFILE=) or free memory",
            )
        if isinstance(exc, httpx.ConnectError) and number in NOBODY_LISTENS:
            return error(
                Code.ENGINE_SOCKET_GONE,
                f"nobody listens on the engine's private socket {self._path}: "
                f"{os.strerror(number if self.has_name() else errno.ENOENT)}",
            )
        return error(Code.ENGINE_UNREACHABLE, f"{question}: no answer from the engine: {what}")

    def _prove(self, answer: httpx.Response) -> None:
        stream = answer.extensions["network_stream"]
        peer = stream.get_extra_info("socket")
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if pid != self.process.engine.pid:
            raise error(
                Code.ENGINE_UNPROVEN,
                f"{self._path} is served by pid {pid}, not by the engine "
                f"(pid {self.process.engine.pid})",
            )

    def _declined(self, otherwise: Code, path: str, status: int, body: bytes) -> LlamactlError:
        """Return the engine's reason as an error; `otherwise` is the code for an unknown one."""
        try:
            refusal = _Refused.model_validate_json(body).error
        except ValidationError:
            return self._broken(path, status, body)
        if isinstance(refusal, _Unsupported):
            return error(Code.NOT_SUPPORTED, refusal.message)
        known = refusal.reason in Code.__members__.values()
        return error(
            refusal.reason if known else otherwise,
            refusal.message,
            details=refusal.details | {"reason": refusal.reason},
        )

    def _read(
        self, parse: Callable[[bytes], _Shape], path: str, status: int, body: bytes
    ) -> _Shape:
        try:
            return parse(body)
        except ValidationError as exc:
            raise self._broken(path, status, body) from exc

    @staticmethod
    def _broken(path: str, status: int, body: bytes) -> LlamactlError:
        start = body[:200].decode(errors="replace")
        return error(
            Code.ENGINE_ANSWER_BROKEN,
            f"{path}: HTTP {status} from the engine with a body that makes no sense: {start!r}",
            details={"status": status, "body_start": start},
        )


def _errno(exc: BaseException | None) -> int:
    """Return the number of the system's error that `exc` comes of; 0: of none."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno is not None:
            return exc.errno
        exc = exc.__cause__ or exc.__context__
    return 0


def _late(path: str, within_s: float) -> LlamactlError:
    """Return the error for an engine that does not answer in time."""
    return error(
        Code.TIMED_OUT,
        f"GET {path}: no answer from the engine within {within_s:g} s",
        hint="it may load its weights or be stuck: `llamactl status`, `llamactl logs`",
    )


def _bare(slot: SlotState) -> SlotState:
    """Return the slot without what else the engine says of it: its request's parameters."""
    return SlotState.model_validate(
        slot.model_dump(include=set(SlotState.model_fields), exclude_unset=True)
    )
