"""`llamactl status`: the engine and its daemon at a glance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError, ExitCode

from llamactl_cli import drift, holdings, smaps, text
from llamactl_cli.connect import connect, of_daemon
from llamactl_cli.remains_view import RemainsView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.client import Client
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import AvoidedLine, EngineLook, Receipt, Status, UpRequest

    from llamactl_cli.output import Output
    from llamactl_cli.smaps import Resident

SERVING = ("ready", "reconfiguring")
RECENT_LINES = 100
"""As many lines of the ledger are looked through for pauses."""
PAUSES_MAX = 3

TAKEN_ALONG = "conversations that it held in no file are lost"


@dataclass(frozen=True)
class StatusView:
    """What the daemon, the engine, the kernel and the ledger say.

    `uptime_s` and `resident` are the engine's; None without one. `look` None: it serves nothing, or
    `silence` says why it could not be asked.
    `rates` are tokens per second by slot, where somebody measured them.
    """

    status: Status
    uptime_s: float | None = None
    look: EngineLook | None = None
    resident: Resident | None = None
    pauses: tuple[AvoidedLine, ...] = ()
    rates: Mapping[int, float] = field(default_factory=dict)
    silence: str | None = None

    def text(self) -> str:
        """Return the table, one screen of 80 columns."""
        status, engine, look = self.status, self.status.engine, self.look
        spec = None if status.desired is None else status.desired.spec
        geometry = None if engine is None else engine.geometry
        loads = text.count(status.weight_loads, "weight load")
        problem, running = status.problem, status.operation
        memory = self.memory()
        rows = [
            ("engine", self._engine()),
            ("problem", None if problem is None else problem.message),
            ("last exit", self._last_exit()),
            ("crash record", status.crash_record),
            ("its memory", None if status.crash_record is None else TAKEN_ALONG),
            ("owner", self._owner()),
            ("url", None if engine is None else engine.url),
            ("model", None if spec is None else text.middle(spec.model, text.PATH_COLUMNS)),
            ("context", None if geometry is None else text.geometry(geometry)),
            ("usable", None if geometry is None else text.usable(geometry)),
            ("drift", drift.drift(status)),
            ("dropped", self._dropped()),
            ("config", self._config()),
            *(
                (
                    "cut off",
                    f"the apply by {text.printable(each.by)}, with the daemon before: "
                    f"{each.came_to}",
                )
                for each in status.lost
            ),
            *(
                ("unapplied", f"{c.field} is {text.written(c.before)}, not {text.written(c.after)}")
                for c in status.unapplied
            ),
            ("slots", None if self.silence is None else f"not known: {self.silence}"),
            *([] if look is None else holdings.slots(look, self.rates)),
            ("pages", None if look is None else holdings.pages(look)),
            *([] if memory is None else holdings.memory_rows(memory)),
            ("weights", self._weights()),
            ("ledger", f"{loads}, {status.loads_avoided} avoided by reconfiguring"),
            ("lost", self._lost()),
            ("log", self._log()),
            ("unsaved", None if status.unsaved is None else status.unsaved.message),
            *holdings.pauses(self.pauses),
            ("parked", self._parked(None if engine is None else engine.last_reconfigure)),
            ("in files", self._in_files()),
            ("carrying", status.carrying if running is None else None),
            ("doing", None if running is None else f"{running.kind} {running.progress}".strip()),
            ("daemon", f"pid {status.daemon.pid}, version {status.daemon.version}"),
            *(
                ("stranger", f"pid {found.pid}: cannot be proven ours; see `llamactl orphans`")
                for found in status.strangers
            ),
        ]
        return text.screen(rows)

    def data(self) -> dict[str, Any]:
        """Return the daemon's own status and what was added to it."""
        look = self.look
        derived = {
            "uptime_s": self.uptime_s,
            "drift": drift.fields(self.status),
            "holds": None if look is None else look.model_dump(mode="json", exclude_unset=True),
            "holds_not_known": self.silence,
            "memory": self.memory(),
            "pauses": [line.model_dump(mode="json") for line in self.pauses],
        }
        return self.status.model_dump(mode="json") | derived

    def _config(self) -> str | None:
        config = self.status.config
        if config is None or config.problem is None:
            return None
        return f"{config.file} has changed and is not in force: {config.problem.message}"

    def memory(self) -> dict[str, Any] | None:
        """Return the memory ledger; None without an engine."""
        if self.resident is None:
            return None
        engine = self.status.engine
        receipt = None if engine is None else engine.last_reconfigure
        full_contexts = None if receipt is None else receipt.bytes_needed or None
        return holdings.memory(self.resident, self.look, full_contexts)

    def _engine(self) -> str:
        status = self.status
        facts: list[str] = [status.state]
        if status.engine is not None:
            facts.append(f"pid {status.engine.pid}")
        if self.uptime_s is not None:
            facts.append(f"up {text.seconds(self.uptime_s)}")
        if status.retry_in_s is not None:
            facts.append(f"retry in {text.seconds(status.retry_in_s)}")
        if status.crashes:
            in_a_row = " in a row" if status.crashes > 1 else ""
            failures = f"{text.count(status.crashes, 'failure')}{in_a_row}"
            over_s = status.forgotten_in_s
            after = f"after {failures}, forgotten in {text.seconds(over_s or 0.0)}"
            facts.append(failures if over_s is None else after)
        return ", ".join(facts)

    def _owner(self) -> str | None:
        """Who has an engine of `llamactl run`; without one, how long it stays for the next."""
        owner, lingers_s = self.status.owner, self.status.lingers_s
        if owner is not None:
            return f"run pid {owner.pid}, port {owner.port}"
        return None if lingers_s is None else f"none; it stays for {text.seconds(lingers_s)}"

    def _last_exit(self) -> str | None:
        ended = self.status.last_exit
        if ended is None or self.status.engine is not None:
            return None
        reason = "" if ended.reason is None else f", by the daemon: {text.printable(ended.reason)}"
        return f"{ended.summary}, {text.local(ended.at)}{reason}"

    def _dropped(self) -> str | None:
        dropped = self.status.dropped_override
        if dropped is None:
            return None
        asked = f"n_ctx {dropped.n_ctx}, n_seq {dropped.n_seq}"
        return f"{asked}, set live {text.local(dropped.at)}: the engine crashed soon after"

    def _lost(self) -> str | None:
        lost = self.status.ledger_lost
        return f"of the ledger {text.lost(lost)}: no disk took them" if lost else None

    def _in_files(self) -> str | None:
        """Return what waits in files: for the next engine, or for one that takes it."""
        status = self.status
        if not status.in_files:
            return None
        found = text.count(status.in_files, "conversation")
        hint = "for the next start" if status.engine is None else "see `llamactl pages ls`"
        return f"{found}, {text.size(status.in_files_bytes)}: {hint}"

    def _log(self) -> str | None:
        dropped = 0 if self.status.engine is None else self.status.engine.log_dropped_bytes
        return f"{text.size(dropped)} are missing in it: no disk took them" if dropped else None

    def _weights(self) -> str | None:
        engine = self.status.engine
        if engine is None or engine.n_weight_loads is None:
            return None
        return f"loaded {text.times(engine.n_weight_loads)} by this engine"

    def _parked(self, receipt: Receipt | None) -> str | None:
        """Say what the last change left parked, where the engine could not be asked."""
        known = self.look is not None and self.look.slots is not None
        if known or receipt is None or not receipt.parked:
            return None
        tokens = text.count(sum(parked.tokens_held for parked in receipt.parked), "token")
        states = text.count(len(receipt.parked), "conversation")
        return f"{states}, {tokens}; a reconfigure that has room places them back"


def status(ctx: typer.Context) -> None:
    """Show engine, slots, pages, memory, weight loads and daemon.

    Exit 0: the engine serves; 3: it does not (stopped, starting, crashed); 4: there is no
    daemon (an engine that outlived it is shown). A sleeping engine sleeps on.
    """
    output: Output = ctx.obj
    with connect(output) as client:
        try:
            found = client.status()
        except DaemonUnreachableError as exc:
            _remains(client.paths, output, exc)
            raise
        output.emit(view_of(client, found))
    if found.state not in SERVING:
        raise typer.Exit(ExitCode.NOT_RUNNING)


def view_of(client: Client, found: Status) -> StatusView:
    """Return the view of a status, with what only the engine, the kernel and the ledger know."""
    from llamactl_supervisor import procfs
    from llamactl_supervisor.errors import LlamactlError

    look, silence = None, None
    if found.state in SERVING:
        try:
            look = client.look()
        except LlamactlError as exc:  # it may end while we ask
            silence = exc.message
    pauses = _pauses(of_daemon(client.paths, found.daemon))
    if found.engine is None:
        return StatusView(found, look=look, silence=silence, pauses=pauses)
    pid = found.engine.pid
    model = _model_of(found.desired)
    resident = smaps.resident(pid, model)
    return StatusView(found, procfs.age_s(pid), look, resident, pauses, silence=silence)


def _model_of(request: UpRequest | None) -> str | None:
    return None if request is None else request.spec.model


def _remains(paths: Paths, output: Output, exc: DaemonUnreachableError) -> None:
    """Show the engines that outlived the daemon."""
    from llamactl_supervisor import remains

    if "pid" in exc.details:  # it lives, and its engine is its own
        return
    engines = [found for found in remains.recorded(paths) if found.role == "engine"]
    if engines:
        output.emit(RemainsView.of(engines, _model_of(remains.desired(paths)), _pauses(paths)))


def _pauses(paths: Paths) -> tuple[AvoidedLine, ...]:
    from llamactl_supervisor import ledger
    from llamactl_supervisor.models import AvoidedLine

    lines = ledger.recent(paths.ledger_file, RECENT_LINES)
    return tuple(line for line in lines if isinstance(line, AvoidedLine))[-PAUSES_MAX:]
