"""`llamactl status`: the engine and its daemon at a glance."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError, ExitCode

from llamactl_cli import drift, holdings, proc, remains, text
from llamactl_cli.connect import connect
from llamactl_cli.remains_view import RemainsView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.client import ControlClient
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.models import AvoidedLine, EngineLook, Receipt, Status

    from llamactl_cli.output import Output
    from llamactl_cli.proc import Resident

SERVING = ("ready", "reconfiguring")
RECENT_LINES = 100
"""As many lines of the ledger are looked through for pauses."""
PAUSES_MAX = 3


@dataclass(frozen=True)
class StatusView:
    """What the daemon, the engine, the kernel and the ledger say.

    `uptime_s` and `resident` are the engine's; None without one. `look` None: it serves nothing.
    `rates` are tokens per second by slot, where somebody measured them.
    """

    status: Status
    uptime_s: float | None = None
    look: EngineLook | None = None
    resident: Resident | None = None
    pauses: tuple[AvoidedLine, ...] = ()
    rates: Mapping[int, float] = field(default_factory=dict)

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
            ("crash record", status.crash_record if self._last_exit() else None),
            ("url", None if engine is None else engine.url),
            ("model", None if spec is None else text.middle(spec.model, text.PATH_COLUMNS)),
            ("context", None if geometry is None else text.geometry(geometry)),
            ("usable", None if geometry is None else text.usable(geometry)),
            ("drift", drift.drift(status)),
            ("dropped", self._dropped()),
            *(
                ("unapplied", f"{c.field} is {text.value(c.before)}, not {text.value(c.after)}")
                for c in status.unapplied
            ),
            *([] if look is None else holdings.slots(look, self.rates)),
            ("pages", None if look is None else holdings.pages(look)),
            *([] if memory is None else holdings.memory_rows(memory)),
            ("weights", self._weights()),
            ("ledger", f"{loads}, {status.loads_avoided} avoided by reconfiguring"),
            *holdings.pauses(self.pauses),
            ("parked", self._parked(None if engine is None else engine.last_reconfigure)),
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
            "memory": self.memory(),
            "pauses": [line.model_dump(mode="json") for line in self.pauses],
        }
        return self.status.model_dump(mode="json") | derived

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
            facts.append(f"crashed {text.times(status.crashes)}")
        return ", ".join(facts)

    def _last_exit(self) -> str | None:
        ended = self.status.last_exit
        if ended is None or self.status.engine is not None:
            return None
        return f"{ended.summary}, {text.local(ended.at)}"

    def _dropped(self) -> str | None:
        dropped = self.status.dropped_override
        if dropped is None:
            return None
        asked = f"n_ctx {dropped.n_ctx}, n_seq {dropped.n_seq}"
        return f"{asked}, set live {text.local(dropped.at)}: the engine crashed soon after"

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


def view_of(client: ControlClient, found: Status) -> StatusView:
    """Return the view of a status, with what only the engine, the kernel and the ledger know."""
    from llamactl_supervisor.errors import LlamactlError

    look = None
    if found.state in SERVING:
        with contextlib.suppress(LlamactlError):  # it may end while we ask
            look = client.look()
    pauses = _pauses(client.paths)
    if found.engine is None:
        return StatusView(found, look=look, pauses=pauses)
    pid = found.engine.pid
    model = None if found.desired is None else found.desired.spec.model
    return StatusView(found, proc.age_s(pid), look, proc.resident(pid, model), pauses)


def _remains(paths: Paths, output: Output, exc: DaemonUnreachableError) -> None:
    """Show the engines that outlived the daemon; name them in its error too.

    And the daemon of another runtime directory that has the state: none of ours can start then.
    """
    from llamactl_supervisor.client import state_holder

    holder = state_holder(paths)
    if holder is not None:
        exc.hint = f"{holder} has the state directory {paths.state}: ask it with its own"
        exc.hint += " LLAMACTL_RUNTIME_DIR"
        exc.details["state_owned_by"] = str(holder)
    if "pid" in exc.details:  # it lives, and its engine is its own
        return
    engines = [found for found in remains.recorded(paths) if found.role == "engine"]
    if not engines:
        return
    pids = [found.pid for found in engines]
    if holder is None:
        exc.hint = f"engine {pids[0]} outlived it: `llamactl up` adopts it, `down` stops it"
    exc.details["engine_pids"] = pids
    output.emit(RemainsView.of(engines, remains.saved(paths), _pauses(paths)))


def _pauses(paths: Paths) -> tuple[AvoidedLine, ...]:
    from llamactl_supervisor.client import recent_lines
    from llamactl_supervisor.models import AvoidedLine

    lines = recent_lines(paths, RECENT_LINES)
    return tuple(line for line in lines if isinstance(line, AvoidedLine))[-PAUSES_MAX:]
