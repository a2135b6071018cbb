"""`llamactl status`: the engine and its daemon at a glance."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from llamactl_supervisor.errors import DaemonUnreachableError, ExitCode

from llamactl_cli import remains, text

if TYPE_CHECKING:
    from datetime import datetime

    from llamactl_supervisor.models import Receipt, Status

    from llamactl_cli.output import Output

SERVING = ("ready", "reconfiguring")
GEOMETRY = ("n_ctx", "n_seq", "kv_unified")


@dataclass(frozen=True)
class StatusView:
    """What the daemon knows; `uptime_s` is the engine's, None without one."""

    status: Status
    uptime_s: float | None

    def text(self) -> str:
        """Return the table."""
        status, engine = self.status, self.status.engine
        spec = None if status.desired is None else status.desired.spec
        geometry = None if engine is None else engine.geometry
        loads = text.count(status.weight_loads, "weight load")
        problem, running = status.problem, status.operation
        rows = [
            ("engine", self._engine()),
            ("problem", None if problem is None else problem.message),
            ("last exit", self._last_exit()),
            ("url", None if engine is None else engine.url),
            ("model", None if spec is None else spec.model),
            ("context", None if geometry is None else text.geometry(geometry)),
            ("usable", None if geometry is None else text.usable(geometry)),
            ("drift", self._drift()),
            *(
                ("unapplied", f"{c.field} is {text.value(c.before)}, not {text.value(c.after)}")
                for c in status.unapplied
            ),
            ("weights", self._weights()),
            ("ledger", f"{loads}, {status.loads_avoided} avoided by reconfiguring"),
            ("last pause", self._last_pause(None if engine is None else engine.last_reconfigure)),
            ("parked", self._parked(None if engine is None else engine.last_reconfigure)),
            ("doing", None if running is None else f"{running.kind} {running.progress}".strip()),
            ("daemon", f"pid {status.daemon.pid}, version {status.daemon.version}"),
            *(
                ("stranger", f"pid {found.pid}: cannot be proven ours; not used, not killed")
                for found in status.strangers
            ),
        ]
        return text.table(rows)

    def data(self) -> dict[str, Any]:
        """Return the daemon's own status with the uptime and the drift."""
        derived = {"uptime_s": self.uptime_s, "drift": self.drift()}
        return self.status.model_dump(mode="json") | derived

    def drift(self) -> dict[str, dict[str, Any]]:
        """Return each field that was set live to something else than `up` had asked for."""
        override, desired = self.status.override, self.status.desired
        if override is None or desired is None:
            return {}
        pairs = {name: (getattr(desired.spec, name), getattr(override, name)) for name in GEOMETRY}
        return {
            name: {"asked": asked, "live": live}
            for name, (asked, live) in pairs.items()
            if asked != live
        }

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
        return f"{ended.summary}, {_local(ended.at)}"

    def _drift(self) -> str | None:
        override = self.status.override
        changed = [
            f"{name} is {pair['live']}, `up` asked for {pair['asked']}"
            for name, pair in self.drift().items()
        ]
        if override is None or not changed:
            return None
        return f"{'; '.join(changed)} (set live {_local(override.at)})"

    def _weights(self) -> str | None:
        engine = self.status.engine
        if engine is None or engine.n_weight_loads is None:
            return None
        return f"loaded {text.times(engine.n_weight_loads)} by this engine"

    def _last_pause(self, receipt: Receipt | None) -> str | None:
        if receipt is None:
            return None
        change = f"{text.geometry(receipt.previous)} -> {text.geometry(receipt.geometry)}"
        return f"{receipt.pause_ms:.1f} ms ({change})"

    def _parked(self, receipt: Receipt | None) -> str | None:
        """Say what the last change left parked: more is not known without asking the engine."""
        if receipt is None or not receipt.parked:
            return None
        tokens = text.count(sum(parked.tokens_held for parked in receipt.parked), "token")
        states = text.count(len(receipt.parked), "conversation")
        return f"{states}, {tokens}; a reconfigure that has room places them back"


def status(ctx: typer.Context) -> None:
    """Show engine, geometry, weight loads and daemon.

    Exit 0: the engine serves; 3: it does not (stopped, starting, crashed); 4: there is no
    daemon.
    """
    from llamactl_supervisor.client import ControlClient

    output: Output = ctx.obj
    with ControlClient() as client:
        try:
            found = client.status()
        except DaemonUnreachableError as exc:
            if pids := remains.engine_pids(client.paths):
                exc.hint = f"engine {pids[0]} outlived it: `llamactl up` adopts it, `down` stops it"
                exc.details["engine_pids"] = pids
            raise
    uptime_s = None if found.engine is None else _uptime_s(found.engine.pid)
    output.emit(StatusView(found, uptime_s))
    if found.state not in SERVING:
        raise typer.Exit(ExitCode.NOT_RUNNING)


def _uptime_s(pid: int) -> float | None:
    import psutil

    try:
        return round(time.time() - psutil.Process(pid).create_time(), 1)
    except psutil.Error:
        return None


def _local(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"
