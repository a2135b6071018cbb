"""The control client: what a script, an orchestrator or the command line says to the daemon.

from llamactl_supervisor.client import ControlClient
with ControlClient() as llama:
    receipt = llama.wait_operation(llama.reconfigure(n_ctx=131072, n_seq=4)).result
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, ValidationError

from llamactl_supervisor.config import daemon_env, load_paths
from llamactl_supervisor.errors import Code, DaemonUnreachableError, FailedError, error
from llamactl_supervisor.models import (
    ENGINE_READ_S,
    EngineLook,
    Ledger,
    LifecycleOutcome,
    LifecycleResult,
    Operation,
    OperationState,
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
from llamactl_supervisor.paths import make_private_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from datetime import datetime
    from pathlib import Path

    from llamactl_supervisor.errors import LlamactlError
    from llamactl_supervisor.locks import Holder as Holder
    from llamactl_supervisor.models import LedgerLine
    from llamactl_supervisor.paths import Paths

ANSWER_S = 10.0
"""How long the daemon may take to answer where it does not have to ask the engine."""
LONG_POLL_S = 25.0
"""How long one question for an operation's end stays open."""
START_S = 30.0
"""How long a new daemon may take until its socket answers."""
START_POLL_S = 0.02
"""Pause between two tries to reach it."""

_Shape = TypeVar("_Shape", bound=BaseModel)


class _AnyDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class AnyDaemon(_AnyDocument):
    """The daemon itself, whatever its version."""

    pid: int
    version: str


class AnyRequest(_AnyDocument):
    """What it was asked for."""

    engine_path: str | None = None


class AnyStatus(_AnyDocument):
    """The part of a status that is in every version's."""

    daemon: AnyDaemon
    desired: AnyRequest | None = None


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket. The standard library's: it is imported in a fifth of the time."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("llamactl", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ControlClient:
    """Talks to one daemon over its unix socket, with one connection for each call.

    Every method raises `DaemonUnreachableError` when nothing answers, and otherwise the error that
    the daemon reported (`llamactl_supervisor.errors`). Mutations return at once with a running
    operation; `wait_operation` waits for its end.
    """

    def __init__(self, paths: Paths | None = None) -> None:
        self.paths = load_paths() if paths is None else paths

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no connection outlives its call."""

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Return everything the daemon knows, if it answers within `timeout_s` seconds."""
        return self._call(Status, "GET", "/v1/status", timeout_s=timeout_s)

    def any_status(self) -> AnyStatus:
        """Return what can be understood of a daemon of another version too."""
        return self._call(AnyStatus, "GET", "/v1/status")

    def up(self, request: UpRequest, *, exact: bool = False) -> Operation:
        """Run this engine. The same request again is `already_up`, another one a `conflict`.

        A geometry that was set live is kept, and no conflict, unless the one of the request is to
        be `exact`.
        """
        path = "/v1/up?exact=true" if exact else "/v1/up"
        return self._call(Operation, "POST", path, body=request.model_dump(mode="json"))

    def start(self) -> Operation:
        """Start the engine that was last asked for."""
        return self._call(Operation, "POST", "/v1/start")

    def stop(self) -> Operation:
        """Stop the engine; the daemon stays."""
        return self._call(Operation, "POST", "/v1/stop")

    def restart(self) -> Operation:
        """Stop the engine and load it again, with the geometry it was last given."""
        return self._call(Operation, "POST", "/v1/restart")

    def down(self) -> Operation:
        """Stop the engine, then the daemon. See `wait_down` for waiting until both are gone."""
        return self._call(Operation, "POST", "/v1/down")

    def reconfigure(
        self,
        *,
        n_ctx: int | None = None,
        n_seq: int | None = None,
        kv_unified: bool | None = None,
        dry_run: bool = False,
    ) -> Operation:
        """Change the live geometry: n_ctx tokens in total over n_seq slots.

        The operation's result is the engine's `Receipt`. Raises `engine_stopped` without an
        engine; a refusal by the engine ends the operation with the engine's reason as code.
        """
        given = {"n_ctx": n_ctx, "n_seq": n_seq, "kv_unified": kv_unified, "dry_run": dry_run}
        request = ReconfigureRequest.parse(given)
        body = request.model_dump(mode="json", exclude_none=True)
        return self._call(Operation, "POST", "/v1/reconfigure", body=body)

    def reload(self) -> Operation:
        """Have the daemon read its configuration again.

        The operation's result is a `ReloadResult`. It fails as `config_refused` when the file is
        broken and with the engine's reason when that declines; the old configuration stays then.
        """
        return self._call(Operation, "POST", "/v1/reload")

    def page_out(self, name: str, slot: int) -> Operation:
        """Take the slot's conversation out into host memory, as page `name`.

        It waits while the slot is busy. The operation's result is the engine's `PageReceipt`;
        a refusal ends it with the engine's reason as code (`bad_name`, `empty_slot`, ...).
        """
        return self._page("out", PageRequest.parse({"name": name, "slot": slot}))

    def page_in(self, name: str, slot: int) -> Operation:
        """Put page `name` into the slot, in place of what it holds; the page is gone then."""
        return self._page("in", PageRequest.parse({"name": name, "slot": slot}))

    def page_drop(self, name: str) -> Operation:
        """Free page `name`."""
        return self._page("drop", PageDropRequest.parse({"name": name}))

    def page_spill(
        self, name: str, *, filename: str | None = None, drop: bool = False
    ) -> Operation:
        """Write page `name` to files of that name or of `filename`; `drop` frees it afterwards.

        The operation's result is the engine's `FileReceipt`; a refusal ends it with the engine's
        reason as code (`unknown_page`, `no_space`, ...).
        """
        request = PageSpillRequest.parse({"name": name, "filename": filename, "drop": drop})
        return self._page("spill", request)

    def page_save(self, slot: int, filename: str) -> Operation:
        """Write the slot's conversation to files; it stays. Waits while the slot is busy."""
        return self._page("save", PageFileRequest.parse({"filename": filename, "slot": slot}))

    def page_restore(self, filename: str, slot: int) -> Operation:
        """Read files into the slot, in place of what it holds; see `lost` of the receipt."""
        return self._page("restore", PageFileRequest.parse({"filename": filename, "slot": slot}))

    def pages(self, *, timeout_s: float = ENGINE_READ_S + ANSWER_S) -> Pages:
        """Return the engine's pages. Raises `engine_stopped` without an engine, `timed_out`."""
        return self._engine_read(Pages, "/v1/pages", timeout_s)

    def slots(self, *, timeout_s: float = ENGINE_READ_S + ANSWER_S) -> Slots:
        """Return the engine's slots; a sleeping engine is woken and loads its weights.

        Raises `engine_stopped` without an engine, `timed_out`.
        """
        return self._engine_read(Slots, "/v1/slots", timeout_s)

    def _engine_read(self, shape: type[_Shape], path: str, timeout_s: float) -> _Shape:
        try:
            return self._call(shape, "GET", path, timeout_s=timeout_s)
        except DaemonUnreachableError as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            raise error(
                Code.TIMED_OUT,
                f"the engine has not answered within {timeout_s:g} s",
                hint="it may load its weights or be stuck: `llamactl status`, `llamactl logs`",
            ) from exc

    def look(self) -> EngineLook:
        """Return what the engine holds now. Nothing is woken or waited for; `top` asks often."""
        return self._call(EngineLook, "GET", "/v1/engine")

    def ledger(self, *, since: datetime | None = None, limit: int | None = None) -> Ledger:
        """Return the ledger's newest `limit` lines from `since` (with a time zone) on.

        The newest is last; without a limit they are as many as the daemon gives at most. The
        totals are over the whole ledger.
        """
        given = {"since": None if since is None else since.isoformat(), "limit": limit}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        return self._call(Ledger, "GET", f"/v1/ledger?{query}")

    def _page(self, verb: str, request: PageDropRequest | PageFileRequest) -> Operation:
        return self._call(Operation, "POST", f"/v1/pages/{verb}", body=request.model_dump())

    def operation(
        self, operation_id: str, *, wait_s: float = 0.0, answer_s: float = ANSWER_S
    ) -> Operation:
        """Return the operation, at its end or after `wait_s` seconds at the latest.

        The daemon may take `answer_s` seconds more to say so.
        """
        path = f"/v1/operations/{quote(operation_id, safe='')}?wait_s={wait_s:.3f}"
        return self._call(Operation, "GET", path, timeout_s=wait_s + answer_s)

    def wait_operation(
        self,
        operation: Operation,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Operation:
        """Return `operation` once it succeeded; raise its error if it failed.

        Raises `timed_out` after `timeout_s` seconds (None: never); the operation goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while operation.state is OperationState.RUNNING:
            if on_progress is not None:
                on_progress(operation.progress)
            left_s = LONG_POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise error(
                    Code.TIMED_OUT,
                    f"{operation.kind} has not ended within {timeout_s:g} s: {operation.progress}",
                    hint="it goes on; `llamactl status` shows it",
                    details={"operation_id": operation.id},
                )
            operation = self.operation(operation.id, wait_s=min(left_s, LONG_POLL_S))
        if operation.error is not None:
            raise operation.error.to_error()
        return operation

    def wait_down(self, *, timeout_s: float | None = None) -> LifecycleResult:
        """Stop engine and daemon; return when the daemon's process is gone.

        What a daemon of another version says of that need not be understood: its end is told by
        the kernel.
        """
        started = time.monotonic()
        daemon_fd = os.pidfd_open(self.any_status().daemon.pid)
        result: object = None
        try:
            try:
                result = self.wait_operation(self.down(), timeout_s=timeout_s).result
            except FailedError as exc:
                if exc.code != Code.OTHER_VERSION:
                    raise
            poll = select.poll()
            poll.register(daemon_fd, select.POLLIN)
            left_s = None if timeout_s is None else timeout_s - (time.monotonic() - started)
            if not poll.poll(None if left_s is None else max(left_s, 0.0) * 1000):
                raise error(Code.TIMED_OUT, f"the daemon did not exit within {timeout_s:g} s")
        finally:
            os.close(daemon_fd)
        if isinstance(result, LifecycleResult):
            return result
        return LifecycleResult(outcome=LifecycleOutcome.STOPPED)

    def logs(
        self, *, lines: int = 200, follow: bool = False, since: datetime | None = None
    ) -> Generator[str, None, None]:
        """Yield the engine's last log lines, without line ends; `follow` yields new ones for ever.

        `since`, with a time zone, leaves older ones out.
        A line is `<UTC time> <stdout|stderr> <what the engine wrote>`.
        """
        asked = {"lines": lines, "follow": str(follow).lower()}
        if since is not None:
            asked["since"] = since.isoformat()
        path = f"/v1/logs?{urlencode(asked)}"
        with closing(self._connect(None if follow else ANSWER_S)) as connection:
            answer = self._ask(connection, "GET", path)
            try:
                for line in answer:
                    yield line.decode(errors="replace").rstrip("\n")
            except (OSError, http.client.HTTPException):
                return  # the daemon has ended

    def _call(
        self,
        shape: type[_Shape],
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> _Shape:
        with closing(self._connect(timeout_s)) as connection:
            answer = self._ask(connection, method, path, body)
            try:
                return shape.model_validate_json(answer.read())
            except (OSError, http.client.HTTPException) as exc:
                raise self._unreachable(exc) from exc
            except ValidationError as exc:
                raise error(
                    Code.OTHER_VERSION,
                    f"{method} {path}: the daemon's answer is no {shape.__name__} of this version",
                    hint="restart the daemon after an upgrade: llamactl down, then llamactl up",
                    details={"problem": str(exc)},
                ) from exc

    def _connect(self, timeout_s: float | None) -> _UnixConnection:
        return _UnixConnection(self.paths.control_socket, timeout_s)

    def _ask(
        self,
        connection: _UnixConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        """Return a good answer, not yet read; raise the problem that the daemon reports."""
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            if answer.status < http.client.BAD_REQUEST:
                return answer
            text = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise self._unreachable(exc) from exc
        try:
            raise Problem.model_validate_json(text).to_error()
        except ValidationError:
            raise error(
                Code.INTERNAL, f"{method} {path}: the daemon answered HTTP {answer.status}"
            ) from None

    def _unreachable(self, exc: Exception) -> LlamactlError:
        socket = self.paths.control_socket
        # Somebody listens; `pid` in the details tells it from a daemon that is not there.
        listens = isinstance(exc, TimeoutError | BlockingIOError)
        if listens and (pid := _holder(self.paths)) is not None:
            return error(
                Code.DAEMON_UNREACHABLE,
                f"the daemon (pid {pid}) does not answer",
                hint=f"it is busy or stopped: `kill -CONT {pid}`, or see {self.paths.daemon_log}",
                details={"control_socket": str(socket), "pid": pid},
            )
        return error(
            Code.DAEMON_UNREACHABLE,
            f"no daemon answers on {socket}: {exc}",
            hint="start one with `llamactl up`",
            details={"control_socket": str(socket)},
        )


def _holder(paths: Paths) -> int | None:
    from llamactl_supervisor import locks

    return locks.owner(paths.daemon_lock)


def read_ledger(paths: Paths, *, since: datetime | None = None, limit: int | None = None) -> Ledger:
    """Return what `ControlClient.ledger` does, without a daemon. Raises `state_unreadable`."""
    from llamactl_supervisor import ledger

    return ledger.read(paths.ledger_file, since=since, limit=limit)


def recent_lines(paths: Paths, count: int) -> list[LedgerLine]:
    """Return the ledger's last lines at once, however long it is, without a daemon."""
    from llamactl_supervisor import ledger

    return ledger.recent(paths.ledger_file, count)


def state_holder(paths: Paths) -> Holder | None:
    """Return the living daemon of another runtime directory that has this state directory."""
    from llamactl_supervisor import locks

    return locks.elsewhere(paths)


def spawn_daemon(paths: Paths, *, resume: bool = False, timeout_s: float = START_S) -> None:
    """Start a daemon that outlives this process; return when its control socket answers.

    The daemon has its own session and none of our descriptors: its output goes to the daemon log.
    It adopts an engine that still runs; it loads one from its saved intent only if `resume`.
    Raises the daemon's own error if it says why it cannot start, else `daemon_start_failed` with
    the log's last lines; `daemon_running` where a daemon of another runtime directory has this
    state directory.
    """
    if (holder := state_holder(paths)) is not None:
        raise error(
            Code.DAEMON_RUNNING,
            f"{holder} already runs for {paths.state}",
            hint="use it with its LLAMACTL_RUNTIME_DIR, or set another LLAMACTL_STATE_DIR as well",
            details={"pid": holder.pid, "runtime_dir": holder.runtime},
        )
    make_private_dir(paths.state)
    make_private_dir(paths.logs)
    argv = [sys.executable, "-P", "-m", "llamactl_supervisor", "serve"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log_fd = os.open(paths.daemon_log, flags, 0o600)
    log_offset = os.fstat(log_fd).st_size
    problem_fd, write_fd = os.pipe()
    argv += ["--problem-fd", str(write_fd)]
    try:
        daemon = subprocess.Popen(
            argv if resume else [*argv, "--no-resume"],
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            env=daemon_env(paths),
            cwd="/",
        )
    except BaseException:
        os.close(problem_fd)
        raise
    finally:
        os.close(log_fd)
        os.close(write_fd)
    try:
        with os.fdopen(problem_fd, "rb") as problem:
            _wait_socket(paths, daemon, problem, log_offset, timeout_s)
    finally:
        # It is not ours to wait for any more: without this, Popen warns that it still runs.
        daemon.returncode = daemon.returncode or 0


def _wait_socket(
    paths: Paths,
    daemon: subprocess.Popen[bytes],
    problem: BinaryIO,
    log_offset: int,
    timeout_s: float,
) -> None:
    deadline = time.monotonic() + timeout_s
    daemon_fd = os.pidfd_open(daemon.pid)
    poll = select.poll()
    poll.register(daemon_fd, select.POLLIN)
    exited = another = False
    try:
        with ControlClient(paths) as client:
            while True:
                if exited:
                    time.sleep(START_POLL_S)
                elif poll.poll(START_POLL_S * 1000):
                    exited = True
                    daemon.wait()
                try:
                    client.status()
                except DaemonUnreachableError:
                    if exited and not another:
                        another = _another_was_first(problem)
                    if (exited and not another) or time.monotonic() > deadline:
                        raise _start_failed(paths, daemon, log_offset) from None
                else:
                    return
    finally:
        os.close(daemon_fd)


def _another_was_first(problem: BinaryIO) -> bool:
    """Return whether another caller's daemon runs, which will answer for both of us.

    Raises what else the daemon that has ended says of itself; False: it said nothing.
    """
    said = problem.read()
    if not said:
        return False
    found = Problem.model_validate_json(said)
    if found.code != Code.DAEMON_RUNNING:
        raise found.to_error()
    return True


def _start_failed(paths: Paths, daemon: subprocess.Popen[bytes], log_offset: int) -> LlamactlError:
    with paths.daemon_log.open("rb") as log:
        log.seek(log_offset)
        lines = log.read().decode(errors="replace").splitlines()[-20:]
    status = daemon.poll()
    what = "does not answer" if status is None else f"exited with status {status}"
    return error(
        Code.DAEMON_START_FAILED,
        f"the daemon was started and {what}",
        hint=f"see {paths.daemon_log}",
        details={"exit_status": status, "last_lines": lines},
    )
