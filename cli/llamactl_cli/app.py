"""The commands by name, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated

import typer

from llamactl_cli.output import JSON_FLAG

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

JSON_NOTE = f"{JSON_FLAG}: the result as JSON on stdout, an error as JSON on stderr."

COMMANDS = {
    "up": "up",
    "run": "run",
    "down": "down",
    "status": "status",
    "top": "top",
    "ledger": "ledger",
    "reconfigure": "reconfigure",
    "apply": "apply",
    "upgrade": "upgrade",
    "reload": "reload",
    "slots": "slots",
    "logs": "logs",
    "start": "lifecycle",
    "stop": "lifecycle",
    "restart": "lifecycle",
    "wait": "wait",
    "orphans": "orphans",
    "doctor": "doctor",
    "validate": "validate",
    "bench": "bench",
    "env": "env",
    "version": "version",
    "build": "build",
    "serve": "serve",
    "reap": "reap",
    "completion": "completion",
}
"""Where each command is, as help lists them."""
PAGES = {
    "ls": "pages",
    "out": "pages",
    "in": "pages",
    "drop": "pages",
    "spill": "page_files",
    "save": "page_files",
    "restore": "page_files",
    "fsck": "page_check",
    "gc": "page_check",
}
CONFIG = {"show": "config", "check": "config", "docs": "config"}
SYSTEMD = {"install": "systemd", "uninstall": "systemd"}
GROUPS = {
    "pages": ("Take conversations out of their slots and back.", PAGES),
    "config": ("What is configured, and where it comes from.", CONFIG),
    "systemd": ("Run the daemon as a service of systemd.", SYSTEMD),
}
"""Commands of two words: what the first is about, and where each second one is."""

ANY = (0, 1, 2, 130)
"""Every command: done, failed (also where the result cannot be written), usage, interrupted."""
EXITS = {
    "up": (4, 5, 6),
    "down": (4, 5, 6),
    "status": (3, 4),
    "top": (3, 4),
    "reconfigure": (3, 4, 5, 6),
    "reload": (4, 5, 6),
    "apply": (3, 4, 5, 6),
    "upgrade": (3, 4, 5, 6),
    "slots": (3, 4, 5, 6),
    "logs": (4,),
    "start": (3, 4, 5, 6),
    "stop": (4, 5, 6),
    "restart": (3, 4, 5, 6),
    "wait": (4, 6),
    "bench": (5,),
    "serve": (3, 5),
    "reap": (5,),
    **{f"pages {name}": (3, 4, 5, 6) for name in PAGES if PAGES[name] != "page_check"},
    "systemd install": (5,),
    "systemd uninstall": (5,),
}
"""Which codes a command has beside those of `ANY`; its help lists them."""
MEANINGS = {
    0: "done",
    1: "failed",
    2: "usage",
    3: "the engine is not running",
    4: "no daemon answers",
    5: "refused",
    6: "timed out",
    130: "interrupted",
}


def application(word: str) -> typer.Typer:
    """Return the parser for a command line that begins with `word`.

    It knows that command alone, and every one where `word` is none: for help, for a slip. To
    import and inspect all of them takes as long as everything else that `status` does.
    """
    # Plain help: boxes and colours would cost a quarter of the start-up.
    app = typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=_exit_codes(MEANINGS))(llamactl)
    every = word not in COMMANDS | GROUPS
    _register(app, COMMANDS, COMMANDS if every else [word])
    for name, (title, commands) in GROUPS.items():
        if every or word == name:
            group = typer.Typer(rich_markup_mode=None, help=title)
            _register(group, commands, commands, f"{name} ")
            app.add_typer(group, name=name, epilog=JSON_NOTE)
    return app


def _version(ctx: typer.Context, asked: bool) -> None:
    if asked:
        from llamactl_cli import versions
        from llamactl_cli.commands.version import VersionView

        ctx.obj.emit(VersionView(versions.own(), None, None, None))
        raise typer.Exit


def llamactl(
    as_json: Annotated[  # never set: `main` takes it out before parsing; it is here for --help
        bool,
        typer.Option(JSON_FLAG, help="The result as JSON; may also follow the command."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="That of this command.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Supervise one llama-server and change its context live, without reloading the weights."""


def _register(
    app: typer.Typer, commands: dict[str, str], asked: Container[str], group: str = ""
) -> None:
    for name in (name for name in commands if name in asked):
        module = import_module(f"llamactl_cli.commands.{commands[name]}")
        function = getattr(module, f"{name}_" if iskeyword(name) else name)
        codes = sorted({*ANY, *EXITS.get(group + name, ())})
        app.command(name, epilog=f"{JSON_NOTE}\n\n{_exit_codes(codes)}")(function)


def _exit_codes(codes: Iterable[int]) -> str:
    return f"Exit codes: {'; '.join(f'{code} {MEANINGS[code]}' for code in codes)}."
