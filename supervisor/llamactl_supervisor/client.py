"""The control client: what a script, an orchestrator or the command line says to the daemon.

from llamactl_supervisor.client import Client
llama = Client()
receipt = llama.wait_operation(llama.reconfigure(n_ctx=131072, n_seq=4)).result
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from llamactl_supervisor.config import load_paths
from llamactl_supervisor.errors import Code, DaemonUnreachableError, LlamactlError, error
from llamactl_supervisor.models import (
    ENGINE_READ_S,
    AnyStatus,
    ApplyRequest,
    EngineLook,
    Ledger,
    Operation,
    OperationState,
    PageDropRequest,
    PageFileRequest,
    PageRequest,
    Pages,
    PageSpillRequest,
    ReconfigureRequest,
    RestartRequest,
    RunningConfig,
    Slots,
    Status,
    UpRequest,
)
from llamactl_supervisor.transport import ANSWER_S, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from datetime import datetime

    from llamactl_supervisor.paths import Paths

APPLY_ANSWER_S = 300.0
"""How long it may take over an apply before it has begun: it reads samples of a model's files."""
LONG_POLL_S = 25.0
"""How long one question for an operation's end stays open."""
PROGRESS_POLL_S = 1.0
"""The same where somebody watches how far it is."""

_Shape = TypeVar("_Shape", bound=BaseModel)


class Client:
    """One daemon, as its user drives it over its unix socket; blocking, a connection for each call.

        llama = Client()
        operation = llama.reconfigure(n_ctx=131072, n_seq=4)
        receipt = llama.wait_operation(operation).result

    `paths` are the daemon's directories; default: those of the environment and the configuration
    file, as for the command line. A running daemon is needed: `llamactl up` starts one, and
    `llamactl_supervisor.spawn.spawn_daemon` does from Python. May be used by several threads.

    A mutation returns at once, with an `Operation` that goes on whoever hangs up;
    `wait_operation` waits for its end. Which type its `result` has, each method says.

    Every error is a `LlamactlError` (`llamactl_supervisor.errors`) with a stable `code`. A class
    says what can be done about it: `RefusedError` left everything as it was, after a
    `TimedOutError` it goes on. Every method may raise

        daemon_unreachable  no daemon answers, or it took longer than `timeout_s`
        other_version       its answer is not understood: it is of another version
        internal            the daemon has a defect; its log says more

    and every mutation `shutting_down` (the daemon is about to end) and `invalid_request` (a value
    makes no sense; nothing was done). What else a method may raise, or its operation may fail with,
    the method says. The verbs of pages and files, `page_*`, all raise `engine_stopped` without an
    engine, and `operation_in_progress` while it starts or when several of them wait for slots.
    """

    def __init__(self, paths: Paths | None = None) -> None:
        """Choose the daemon; nothing is connected yet.

        Without `paths`, raises `config_invalid` or `config_insecure` for a configuration file that
        is not to be used, `path_too_long` for a directory that a socket does not fit into.
        """
        self.paths = load_paths() if paths is None else paths
        self._daemon = Transport(self.paths)

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Do nothing: no connection outlives its call."""

    # --- what is known ---------------------------------------------------------------------------

    def status(self, *, timeout_s: float = ANSWER_S) -> Status:
        """Return everything the daemon knows, if it answers within `timeout_s` seconds.

        The engine is not asked: this is as quick when it sleeps, loads or hangs.
        """
        return self._daemon.call(Status, "GET", "/v1/status", timeout_s=timeout_s)

    def any_status(self) -> AnyStatus:
        """Return what can be understood of a daemon of another version too."""
        return self._daemon.call(AnyStatus, "GET", "/v1/status")

    def config(self) -> RunningConfig:
        """Return every key of the configuration: what the daemon has read, and what is in force.

        Values are in the unit that ends the key's name. The engine is not asked.
        """
        return self._daemon.call(RunningConfig, "GET", "/v1/config")

    def look(self) -> EngineLook:
        """Return the engine's slots and pages, without waking it and without waiting for it.

        Cheap enough to be asked every second. Raises `engine_stopped` without an engine,
        `operation_in_progress` while it starts.
        """
        return self._daemon.call(EngineLook, "GET", "/v1/engine")

    def slots(self, *, timeout_s: float = ENGINE_READ_S + ANSWER_S) -> Slots:
        """Return the engine's slots, then the parked ones, within `timeout_s` seconds.

        A sleeping engine is woken and loads its weights; a busy one answers after its batch. Raises
        `engine_stopped` without an engine, `operation_in_progress` while it starts, `timed_out`.
        """
        return self._engine_read(Slots, "/v1/slots", timeout_s)

    def pages(self, *, timeout_s: float = ENGINE_READ_S + ANSWER_S) -> Pages:
        """Return the engine's pages, parked conversations among them, within `timeout_s` seconds.

        A sleeping engine sleeps on. Raises `engine_stopped` without an engine,
        `operation_in_progress` while it starts, `timed_out`.
        """
        return self._engine_read(Pages, "/v1/pages", timeout_s)

    def ledger(
        self,
        *,
        since: datetime | None = None,
        limit: int | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Ledger:
        """Return the ledger's newest `limit` lines from `since` (with a time zone) on.

        The newest is last; without a limit they are as many as the daemon gives at most. The
        totals are over the whole ledger. Raises `state_unreadable`, `invalid_request`.
        """
        given = {"since": None if since is None else since.isoformat(), "limit": limit}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        return self._daemon.call(Ledger, "GET", f"/v1/ledger?{query}", timeout_s=timeout_s)

    def logs(
        self, *, lines: int = 200, follow: bool = False, since: datetime | None = None
    ) -> Generator[str, None, None]:
        """Yield the engine's last log lines, without line ends; `follow` yields new ones for ever.

        `since`, with a time zone, leaves older ones out. A line is
        `<UTC time> <stdout|stderr> <what the engine wrote>`. Ends with the daemon, as
        `daemon_unreachable` with one that was killed; closing the generator hangs up. Raises
        `invalid_request`.
        """
        asked = {"lines": lines, "follow": str(follow).lower()}
        if since is not None:
            asked["since"] = since.isoformat()
        path = f"/v1/logs?{urlencode(asked)}"
        yield from self._daemon.lines(path, timeout_s=None if follow else ANSWER_S)

    # --- the engine's life -----------------------------------------------------------------------

    def up(self, request: UpRequest, *, exact: bool = False) -> Operation:
        """Run this engine; the operation's result is a `LifecycleResult`, `load_s` in seconds.

        The same request again is `already_up`. Raises `conflict` where another engine is up, and
        `operation_in_progress` while one is being stopped. A geometry that was set live is kept,
        and no conflict, unless the one of the request is to be `exact`. The operation fails with
        why the engine did not start: `engine_exited`, `engine_spawn_failed`, `start_stalled`,
        `port_in_use`, or `superseded` by a stop.
        """
        path = "/v1/up?exact=true" if exact else "/v1/up"
        return self._mutate(path, request)

    def start(self) -> Operation:
        """Start the engine that was last asked for; result and failures are those of `up`.

        Raises `no_spec` where none was asked for yet.
        """
        return self._mutate("/v1/start")

    def stop(self, *, now: bool = False) -> Operation:
        """Stop the engine; the daemon stays. The operation's result is a `LifecycleResult`.

        Without an engine it is `already_stopped`. An `up`, `start`, `restart` or `reconfigure` that
        has not come to its end fails as `superseded`. One that a run has is refused (`owned`)
        unless it is to be `now`: the run ends then too. `now` also ends the wait for conversations
        of an engine that is being stopped; those that are in no file by then are lost.
        """
        return self._mutate(f"/v1/stop?now={'true' if now else 'false'}")

    def restart(self, *, accept_loss: bool = False) -> Operation:
        """Stop the engine and load it again, with the geometry it was last given.

        The result is a `LifecycleResult`; its `carried` tells what became of each conversation. The
        operation fails with `carry_failed` where one cannot be kept, and the engine runs on, unless
        you `accept_loss`. Raises `no_spec` where no engine was asked for yet,
        `operation_in_progress` while it starts, changes or stops, and `restart_refused` where it
        could not be started again: it runs on.
        """
        return self._mutate("/v1/restart", RestartRequest(accept_loss=accept_loss))

    def down(self, *, now: bool = False) -> Operation:
        """Stop the engine, then the daemon; the result is a `LifecycleResult`; `now` as in `stop`.

        The operation ends when the engine is gone, and the daemon shortly after it: `wait_down`
        waits for both. It fails as `engine_unproven` where an engine lives on that may be ours.
        """
        return self._mutate(f"/v1/down?now={'true' if now else 'false'}")

    def reconfigure(
        self,
        *,
        n_ctx: int | None = None,
        n_seq: int | None = None,
        kv_unified: bool | None = None,
        dry_run: bool = False,
    ) -> Operation:
        """Change the live geometry: `n_ctx` tokens in total over `n_seq` slots.

        `kv_unified` makes one pool of them for all slots, or a part for each. What is None stays as
        it is. `dry_run` changes nothing and says what it would take. The operation's result is the
        engine's `Receipt`: `pause_ms` is the time without a token, in milliseconds.

        Raises `invalid_geometry` for a value out of bounds, `engine_stopped` without an engine,
        `operation_in_progress` while it starts or is changed. A refusal by the engine ends the
        operation with the engine's reason as code (`insufficient_memory`, `media_held`,
        `fan_out_in_progress`, ...): everything is as it was before.
        """
        given = {"n_ctx": n_ctx, "n_seq": n_seq, "kv_unified": kv_unified, "dry_run": dry_run}
        return self._mutate("/v1/reconfigure", ReconfigureRequest.parse(given))

    def apply(self, request: ApplyRequest) -> Operation:
        """Bring the engine to this, live where that is possible, else by a relaunch.

            wanted = EngineConfig(n_ctx=32768, extra_args=("--threads", "8"))
            operation = llama.apply(ApplyRequest(engine=wanted))
            result = llama.wait_operation(operation).result  # .plan, .receipt, .lifecycle

        Both are of `llamactl_supervisor.models`. What `engine` does not name stays as it is;
        `dry_run=True` in the request says what it would come to and touches nothing.
        The operation's result is an `ApplyResult`. Raises `apply_refused` for what the engine's
        binary does not take, and `operation_in_progress` where too many wait already. Those
        that wait are carried out together; one of which newer ones set every field ends as
        `superseded`.
        """
        body = request.model_dump(mode="json", exclude_unset=True)
        answer_s = APPLY_ANSWER_S
        self._ask_whether_it_answers()
        return self._daemon.call(Operation, "POST", "/v1/apply", body=body, timeout_s=answer_s)

    def reload(self) -> Operation:
        """Have the daemon read its configuration again; the result is a `ReloadResult`.

        The operation fails as `config_refused` when the file is broken, as `operation_in_progress`
        while the engine starts, changes or stops, and with the engine's reason when that declines
        the new geometry; the old configuration stays then.
        """
        return self._mutate("/v1/reload")

    # --- conversations in and out of slots -------------------------------------------------------

    def page_out(self, name: str, slot: int) -> Operation:
        """Take the conversation of `slot` out into host memory, as page `name`.

        Waits while the slot is busy. The operation's result is the engine's `PageReceipt`. Fails
        as `bad_name`, `bad_slot`, `empty_slot`, `media_held`, `page_ceiling`, ...
        """
        return self._mutate("/v1/pages/out", PageRequest.parse({"name": name, "slot": slot}))

    def page_in(self, name: str, slot: int) -> Operation:
        """Put page `name` into `slot`, in place of what that holds; the page is gone then.

        Waits while the slot is busy. The operation's result is the engine's `PageReceipt`:
        `n_reusable` tokens need not be computed again. Fails as `unknown_page`,
        `bad_slot`, `page_mismatch`, `too_large`, ...
        """
        return self._mutate("/v1/pages/in", PageRequest.parse({"name": name, "slot": slot}))

    def page_drop(self, name: str) -> Operation:
        """Free page `name`: its conversation is lost.

        The operation's result is the engine's `PageReceipt`. Fails as `unknown_page`, or as
        `request_waiting` where a request waits for the page to be placed back.
        """
        return self._mutate("/v1/pages/drop", PageDropRequest.parse({"name": name}))

    def page_spill(
        self, name: str, *, filename: str | None = None, drop: bool = False
    ) -> Operation:
        """Write page `name` to files of that name or of `filename`; `drop` frees it afterwards.

        The operation's result is the engine's `FileReceipt`. Fails as `unknown_page`,
        `no_space`, `not_supported` (the engine was started without a directory for files), ...
        """
        request = PageSpillRequest.parse({"name": name, "filename": filename, "drop": drop})
        return self._mutate("/v1/pages/spill", request)

    def page_save(self, slot: int, filename: str) -> Operation:
        """Write the conversation of `slot` to files; it stays where it is.

        Waits while the slot is busy. The operation's result is the engine's `FileReceipt`. Fails
        as `empty_slot`, `no_space`, `not_supported`, ...
        """
        request = PageFileRequest.parse({"filename": filename, "slot": slot})
        return self._mutate("/v1/pages/save", request)

    def page_restore(self, filename: str, slot: int) -> Operation:
        """Read files into `slot`, in place of what that holds.

        Waits while the slot is busy. The operation's result is the engine's `FileReceipt`: `lost`
        names what the files did not give back. Fails as `no_file`, `bad_file`, `page_mismatch`,
        `not_supported`, ...
        """
        request = PageFileRequest.parse({"filename": filename, "slot": slot})
        return self._mutate("/v1/pages/restore", request)

    # --- the end of an operation -----------------------------------------------------------------

    def operation(
        self, operation_id: str, *, wait_s: float = 0.0, answer_s: float = ANSWER_S
    ) -> Operation:
        """Return the operation, at its end or after `wait_s` seconds (at most 60) at the latest.

        The daemon may take `answer_s` seconds more to say so. Raises `not_found` for one that this
        daemon never had or no longer remembers. An operation that failed is returned, not raised.
        """
        path = f"/v1/operations/{quote(operation_id, safe='')}?wait_s={wait_s:.3f}"
        return self._daemon.call(Operation, "GET", path, timeout_s=wait_s + answer_s)

    def wait_operation(
        self,
        operation: Operation,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[str], None] | None = None,
        planned: bool = False,
    ) -> Operation:
        """Return `operation` once it succeeded; raise its error if it failed.

        Raises `timed_out` after `timeout_s` seconds (None: never); the operation goes on.
        `on_progress` is told now and then, in words, how far it is. With `planned`, an apply that
        still runs is returned as soon as its `plan` is known.
        """
        poll_s = LONG_POLL_S if on_progress is None and not planned else PROGRESS_POLL_S
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while operation.state is OperationState.RUNNING:
            if on_progress is not None:
                on_progress(operation.progress)
            if planned and operation.plan is not None:
                return operation
            left_s = poll_s if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise error(
                    Code.TIMED_OUT,
                    f"{operation.kind} has not ended within {timeout_s:g} s: {operation.progress}",
                    hint="it goes on; `llamactl status` shows it",
                    details={"operation_id": operation.id},
                )
            try:
                operation = self.operation(operation.id, wait_s=min(left_s, poll_s))
            except LlamactlError as exc:
                if exc.code in {Code.DAEMON_UNREACHABLE, Code.NOT_FOUND}:
                    raise _left_open(operation, exc) from exc
                raise
        if operation.error is not None:
            raise operation.error.to_error()
        return operation

    def wait_down(
        self,
        *,
        now: bool = False,
        timeout_s: float | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Operation | None:
        """Stop engine and daemon; return when the daemon's process is gone.

        `now` and `on_progress` are those of `stop` and `wait_operation`.

        None: a daemon of another version says of it what is not understood; its end is told by the
        kernel. Raises `timed_out` after `timeout_s` seconds (None: never), and `engine_unproven`
        after the daemon's end where an engine lives on that may be ours.
        """
        started = time.monotonic()
        daemon_fd = os.pidfd_open(self.any_status().daemon.pid)
        try:
            operation: Operation | None = None
            left_behind: LlamactlError | None = None
            try:
                asked = self.down(now=now)
                operation = self.wait_operation(asked, timeout_s=timeout_s, on_progress=on_progress)
            except LlamactlError as exc:
                if exc.code == Code.ENGINE_UNPROVEN:
                    left_behind = exc
                elif exc.code != Code.OTHER_VERSION:
                    raise
            poll = select.poll()
            poll.register(daemon_fd, select.POLLIN)
            left_s = None if timeout_s is None else timeout_s - (time.monotonic() - started)
            if not poll.poll(None if left_s is None else max(left_s, 0.0) * 1000):
                raise error(Code.TIMED_OUT, f"the daemon did not exit within {timeout_s:g} s")
            if left_behind is not None:
                raise left_behind
            return operation
        finally:
            os.close(daemon_fd)

    def _mutate(self, path: str, request: BaseModel | None = None) -> Operation:
        body = None if request is None else request.model_dump(mode="json", exclude_none=True)
        return self._daemon.call(Operation, "POST", path, body=body)

    def _ask_whether_it_answers(self) -> None:
        """Raise why the daemon does not answer, before something is asked that may take long."""
        self.any_status()

    def _engine_read(self, shape: type[_Shape], path: str, timeout_s: float) -> _Shape:
        self._ask_whether_it_answers()
        try:
            return self._daemon.call(shape, "GET", path, timeout_s=timeout_s)
        except DaemonUnreachableError as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            raise error(
                Code.TIMED_OUT,
                f"the engine has not answered within {timeout_s:g} s",
                hint="it may load its weights or be stuck: `llamactl status`, `llamactl logs`",
            ) from exc


def _left_open(operation: Operation, exc: LlamactlError) -> LlamactlError:
    """Return the error of a wait whose daemon is gone or silent: how it ends is not known."""
    return error(
        exc.code,
        f"{exc.message}; the {operation.kind} that was under way may still be done",
        hint=f"{exc.hint}; `llamactl status` then tells" if exc.hint else "see `llamactl status`",
        details={**exc.details, "operation_id": operation.id},
    )
