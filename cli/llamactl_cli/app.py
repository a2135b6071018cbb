"""The commands by name, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated

import typer

from llamactl_cli.output import JSON_FLAG

if TYPE_CHECKING:
    from collections.abc import Container

EXIT_CODES = """Exit codes: 0 done; 1 failed; 2 usage; 3 the engine is not running;
4 no daemon answers; 5 refused; 6 timed out; 130 interrupted."""
JSON_NOTE = f"{JSON_FLAG}: the result as JSON on stdout, an error as JSON on stderr."

COMMANDS = {
    "up": "up",
    "down": "down",
    "status": "status",
    "top": "top",
    "ledger": "ledger",
    "reconfigure": "reconfigure",
    "reload": "reload",
    "slots": "slots",
    "logs": "logs",
    "start": "lifecycle",
    "stop": "lifecycle",
    "restart": "lifecycle",
    "wait": "wait",
    "orphans": "orphans",
    "doctor": "doctor",
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
    app.callback(epilog=EXIT_CODES)(llamactl)
    every = word not in COMMANDS | GROUPS
    _register(app, COMMANDS, COMMANDS if every else [word])
    for name, (title, commands) in GROUPS.items():
        if every or word == name:
            group = typer.Typer(rich_markup_mode=None, help=title)
            _register(group, commands, commands)
            app.add_typer(group, name=name, epilog=JSON_NOTE)
    return app


def llamactl(
    as_json: Annotated[  # never set: `main` takes it out before parsing; it is here for --help
        bool,
        typer.Option(JSON_FLAG, help="The result as JSON; may also follow the command."),
    ] = False,
) -> None:
    """Supervise one llama-server and change its context live, without reloading the weights."""


def _register(app: typer.Typer, commands: dict[str, str], asked: Container[str]) -> None:
    for name in (name for name in commands if name in asked):
        module = import_module(f"llamactl_cli.commands.{commands[name]}")
        function = getattr(module, f"{name}_" if iskeyword(name) else name)
        app.command(name, epilog=JSON_NOTE)(function)
