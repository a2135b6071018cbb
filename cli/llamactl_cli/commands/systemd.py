"""`llamactl systemd`: the daemon as a service, of the machine or of one user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import text

if TYPE_CHECKING:
    from llamactl_cli.output import Output
    from llamactl_cli.unit_files import Scope

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
"""Where one of these is, the engine may want it."""

User = Annotated[
    bool | None,
    typer.Option("--user/--system", help="For your own systemd, or for the machine's."),
]
Force = Annotated[bool, typer.Option("--force", help="Do it nevertheless.")]


@dataclass(frozen=True)
class UnitsView:
    """What was done about each file, and what to do next.

    `left_out` are variables of the environment that set something here and not in the service.
    """

    done: dict[Path, str]
    next: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def text(self) -> str:
        """Return a row for each file."""
        rows = [(what, str(path)) for path, what in self.done.items()]
        steps = [("next" if n == 0 else "", step) for n, step in enumerate(self.next)]
        if not self.done:
            return "there is nothing to remove"
        left = [("left out" if n == 0 else "", name) for n, name in enumerate(self.left_out)]
        do = [("", "set here only: put it into the configuration file, or `systemctl edit`")]
        return text.table([*rows, *left, *(do if left else []), *steps])

    def data(self) -> dict[str, Any]:
        """Return the same."""
        files = {str(path): what for path, what in self.done.items()}
        return {"files": files, "next": list(self.next), "left_out": list(self.left_out)}


@dataclass(frozen=True)
class DryRunView:
    """What would be written."""

    files: dict[Path, str]

    def text(self) -> str:
        """Return the files, one after the other."""
        return "\n".join(f"### {path}\n{content}" for path, content in self.files.items())

    def data(self) -> dict[str, Any]:
        """Return the same."""
        return {"files": {str(path): content for path, content in self.files.items()}}


def install(
    ctx: typer.Context,
    user: User = None,
    run_as: Annotated[
        str | None,
        typer.Option(
            "--run-as", metavar="USER", help="With --system: who it runs as. [default: you]"
        ),
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option(
            "--gpu/--cpu", help="What the engine computes on. [default: a GPU where there is one]"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--print", help="Print the units; write nothing.")
    ] = False,
    force: Force = False,
) -> None:
    """Write llamactl.socket, llamactl.service and their drop-ins; say what to do next.

    Nothing is started. A file that is not llamactl's own, and a service of another user, are left
    alone (exit 5) unless --force, which keeps the file as .bak. Changes of yours belong into
    drop-ins: systemctl edit.
    """
    from llamactl_cli import unit_files, unit_install, unit_readiness

    output: Output = ctx.obj
    scope = _scope(user, run_as)
    if scope.run_as is not None and (named := os.environ.get("LLAMACTL_CONFIG")) and not force:
        unit_readiness.check_config(Path(named).absolute(), scope.run_as)
    version = unit_install.systemd_version()
    if gpu is None:
        gpu = any(Path(device).exists() for device in GPUS)
    files = unit_files.render(scope, version, gpu=gpu)
    if dry_run:
        output.emit(DryRunView(files))
        return
    done = unit_install.install(files, scope, force=force)
    if version < unit_files.RESTART_KILL_SIGNAL_SINCE:
        output.say(f"systemd {version} hands nothing over: a restart loads the weights again")
    if scope.run_as == "root":
        output.say("it will run as root; --run-as names another user")
    output.emit(UnitsView(done, _next(scope), unit_readiness.left_out(scope, os.environ)))


def uninstall(ctx: typer.Context, user: User = None, force: Force = False) -> None:
    """Remove the units that install wrote.

    Refused (exit 5) while they are enabled or active. State, pages and logs stay, and what install
    had kept as .bak, which is named.
    """
    from llamactl_cli import unit_install

    output: Output = ctx.obj
    scope = _scope(user, None)
    done = unit_install.uninstall(scope, force=force)
    kept = [f"rm {path}  # kept by install" for path in unit_install.put_aside(scope)]
    output.emit(UnitsView(done, (" ".join((*scope.systemctl, "daemon-reload")), *kept)))


def _scope(user: bool | None, run_as: str | None) -> Scope:
    from llamactl_supervisor.config import load

    from llamactl_cli.unit_files import Scope

    if user is None:
        raise typer.BadParameter("one of the two is needed", param_hint="--user or --system")
    if user:
        if run_as is not None:
            raise typer.BadParameter("goes with --system only", param_hint="--run-as")
        return Scope.user(load())
    return Scope.system(_account(run_as), os.environ)


def _account(name: str | None) -> str:
    """Return the name of the user that the service runs as; the caller's, also behind sudo."""
    import pwd

    try:
        if name is None:
            name = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
        return pwd.getpwnam(name).pw_name
    except KeyError:
        message = f"this machine has no user {name or os.getuid()}"
        raise typer.BadParameter(message, param_hint="--run-as") from None


def _next(scope: Scope) -> tuple[str, ...]:
    from llamactl_cli import session
    from llamactl_cli.unit_files import SERVICE, SOCKET

    systemctl = " ".join(scope.systemctl)
    steps = [f"{systemctl} daemon-reload", f"{systemctl} enable --now {SOCKET} {SERVICE}"]
    if scope.run_as is not None:
        where = "LLAMACTL_RUNTIME_DIR=/run/llamactl LLAMACTL_STATE_DIR=/var/lib/llamactl"
        steps.append(f"export {where}  # where the commands find it")
    elif not session.lingers():
        steps.append("loginctl enable-linger  # else it ends at your last logout")
    return tuple(steps)
