"""`llamactl orphans`: engines that no daemon owns, and their end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from llamactl_supervisor.errors import Code, DaemonUnreachableError, ExitCode, error

from llamactl_cli import connect, text

if TYPE_CHECKING:
    from llamactl_supervisor.config import Paths
    from llamactl_supervisor.locks import Holder
    from llamactl_supervisor.remains import Remnant

    from llamactl_cli.output import Output

PROOF = "its holder's record names this very process (pid, start, boot)"


@dataclass(frozen=True)
class OrphansView:
    """What was found, and what became of each that was to be ended: pid by pid, gone or not."""

    found: list[Remnant]
    gone: dict[int, bool]
    elsewhere: Holder | None = None
    """The daemon of another runtime directory that has the state directory: its engine is its."""

    @property
    def left(self) -> list[Remnant]:
        """Those that live on."""
        return [each for each in self.found if not self.gone.get(each.pid, False)]

    def text(self) -> str:
        """Return a paragraph for each."""
        shown = [text.screen(self._rows(each)) for each in self.found] or ["no orphans"]
        if self.elsewhere is not None:
            shown.append(f"the engine of the saved state is owned by {self.elsewhere}")
        return "\n".join(shown)

    def data(self) -> dict[str, Any]:
        """Return the same; `age_s` is null for what is gone."""
        return {
            "orphans": [
                {"pid": each.pid, "start_ticks": each.process.start_ticks, "role": each.role}
                | {"instance_id": each.instance_id, "adoptable": each.adoptable}
                | {"doubt": each.doubt, "holder_pid": each.holder and each.holder.pid}
                | {"age_s": each.age_s, "proven": each.doubt is None}
                | {"ended": self.gone.get(each.pid, False), "do": self._do(each)}
                for each in self.found
            ],
            "state_owned_by": None if self.elsewhere is None else asdict(self.elsewhere),
        }

    def _rows(self, each: Remnant) -> list[tuple[str, str | None]]:
        age = None if each.age_s is None else f", up {text.seconds(each.age_s)}"
        return [
            (each.role, f"pid {each.pid}{age or ''}, instance {each.instance_id}"),
            ("proof", PROOF if each.doubt is None else f"none: {each.doubt}"),
            ("do", self._do(each)),
        ]

    def _do(self, each: Remnant) -> str:
        if each.pid in self.gone:
            return "nothing: it was ended" if self.gone[each.pid] else "it does not end: see dmesg"
        if each.doubt is not None:
            return f"look at it (ps -fp {each.pid}), then end it yourself: kill {each.pid}"
        if each.adoptable:
            return "`llamactl up` takes it over, `llamactl down` or `orphans --end` stops it"
        return "`llamactl orphans --end` stops it"


def orphans(
    ctx: typer.Context,
    end: Annotated[
        bool, typer.Option("--end", help="Stop those that are proven: TERM, after a while KILL.")
    ] = False,
) -> None:
    """List engines of this runtime directory that no daemon owns.

    What cannot be proven to be ours is named and never signalled. Exit 0: there is none left; 1:
    there is.
    """
    from llamactl_supervisor import locks

    output: Output = ctx.obj
    paths, gone = connect.paths(output), {}
    with locks.alone(paths) as alone:
        found = _found(paths, daemon=alone is False)
        if end:
            from llamactl_supervisor import reap

            term_s = connect.settings(output).stop_term_s
            proven = [each for each in found if each.doubt is None]
            with output.activity("ending") as tell:
                for each in proven:
                    tell(f"ending {each.role} {each.pid}")
                    gone[each.pid] = reap.end(paths, each, term_s)
    view = OrphansView(found, gone, locks.elsewhere(paths))
    output.emit(view)
    if view.left:
        raise typer.Exit(ExitCode.FAILED)


def _found(paths: Paths, *, daemon: bool) -> list[Remnant]:
    """Return the orphans. A daemon says itself what it does not own: it may be starting one."""
    from llamactl_supervisor import remains

    recorded = remains.recorded(paths)
    found = recorded + remains.unrecorded(paths, {each.pid for each in recorded})
    if not daemon:
        return found
    from llamactl_supervisor.client import Client

    with Client(paths) as client:
        try:
            status = client.status()
        except DaemonUnreachableError as exc:
            message = "a daemon runs and does not answer: what it owns cannot be known"
            raise error(Code.DAEMON_UNREACHABLE, message, hint=exc.message) from exc
    owned = {status.engine.pid} if status.engine is not None else set()
    strangers = {stranger.pid for stranger in status.strangers}
    known = {each.pid for each in recorded} - strangers
    return [each for each in found if each.pid not in owned | known]
