"""`llamactl completion`: what a shell needs to complete our commands and options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from llamactl_cli.main import COMMAND, COMPLETE

if TYPE_CHECKING:
    from llamactl_cli.output import Output


class Shell(StrEnum):
    """The shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True)
class ScriptView:
    """The script of a shell."""

    shell: Shell
    script: str

    def text(self) -> str:
        """Return the script."""
        return self.script

    def data(self) -> dict[str, str]:
        """Return the same."""
        return {"shell": self.shell, "script": self.script}


def completion(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="For which shell.")]
) -> None:
    """Print the completion script of a shell.

    For bash and zsh: eval "$(llamactl completion bash)". For fish: llamactl completion fish |
    source.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    output: Output = ctx.obj
    script = get_completion_script(prog_name=COMMAND, complete_var=COMPLETE, shell=shell)
    output.emit(ScriptView(shell, script))
