"""The commands by name."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl_cli.commands.build import build
from llamactl_cli.commands.config import check, docs, show
from llamactl_cli.commands.down import down
from llamactl_cli.commands.env import env
from llamactl_cli.commands.lifecycle import restart, start, stop
from llamactl_cli.commands.logs import logs
from llamactl_cli.commands.page_check import fsck, gc
from llamactl_cli.commands.page_files import restore, save, spill
from llamactl_cli.commands.pages import drop, in_, ls, out
from llamactl_cli.commands.reap import reap
from llamactl_cli.commands.reconfigure import reconfigure
from llamactl_cli.commands.reload import reload
from llamactl_cli.commands.serve import serve
from llamactl_cli.commands.slots import slots
from llamactl_cli.commands.status import status
from llamactl_cli.commands.systemd import install, uninstall
from llamactl_cli.commands.up import up
from llamactl_cli.commands.version import version
from llamactl_cli.commands.wait import wait
from llamactl_cli.output import JSON_FLAG

EXIT_CODES = """Exit codes: 0 done; 1 failed; 2 usage; 3 the engine is not running;
4 no daemon answers; 5 refused; 6 timed out; 130 interrupted."""
JSON_NOTE = f"{JSON_FLAG}: the result as JSON on stdout, an error as JSON on stderr."

# Plain help: boxes and colours would cost a quarter of the start-up.
app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(epilog=EXIT_CODES)
def llamactl(
    as_json: Annotated[  # never set: `main` takes it out before parsing; it is here for --help
        bool,
        typer.Option(JSON_FLAG, help="The result as JSON; may also follow the command."),
    ] = False,
) -> None:
    """Supervise one llama-server and change its context live, without reloading the weights."""


for command in (
    up, down, status, reconfigure, reload, slots, logs, start, stop, restart, wait, env, version,
    build, serve, reap,
):  # fmt: skip
    app.command(command.__name__, epilog=JSON_NOTE)(command)

pages = typer.Typer(rich_markup_mode=None, help="Take conversations out of their slots and back.")
for verb in (ls, out, in_, drop, spill, save, restore, fsck, gc):
    pages.command(verb.__name__.rstrip("_"), epilog=JSON_NOTE)(verb)
app.add_typer(pages, name="pages", epilog=JSON_NOTE)

config = typer.Typer(rich_markup_mode=None, help="What is configured, and where it comes from.")
for look in (show, check, docs):
    config.command(look.__name__, epilog=JSON_NOTE)(look)
app.add_typer(config, name="config", epilog=JSON_NOTE)

systemd = typer.Typer(rich_markup_mode=None, help="Run the daemon as a service of systemd.")
for verb in (install, uninstall):
    systemd.command(verb.__name__, epilog=JSON_NOTE)(verb)
app.add_typer(systemd, name="systemd", epilog=JSON_NOTE)
