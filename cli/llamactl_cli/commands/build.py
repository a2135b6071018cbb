"""`llamactl build`: the engine for this machine, built if it is not there yet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamactl_cli import text
from llamactl_cli.provide import Provider

if TYPE_CHECKING:
    from llamactl_builder.build import EngineBuild

    from llamactl_cli.output import Output


@dataclass(frozen=True)
class BuildView:
    """Its text is the path alone, for `$(llamactl build)`."""

    engine: EngineBuild

    def text(self) -> str:
        """Return the path."""
        return str(self.engine.path)

    def data(self) -> dict[str, Any]:
        """Return everything about the build."""
        return asdict(self.engine) | {"path": str(self.engine.path)}


def build(
    ctx: typer.Context,
    unpatched: Annotated[
        bool, typer.Option("--unpatched", help="The pristine engine, for comparisons.")
    ] = False,
    cmake_arg: Annotated[
        list[str] | None,
        typer.Option("--cmake-arg", metavar="ARG", help="Passed to CMake; may be repeated."),
    ] = None,
) -> None:
    """Build llama-server if it is missing; print its path.

    Cached by content: pin, patches, options, compiler, processor.
    """
    output: Output = ctx.obj
    engine = Provider(output).build(unpatched=unpatched, cmake_args=cmake_arg or ())
    output.say("already built" if engine.cached else f"built in {text.seconds(engine.seconds)}")
    output.emit(BuildView(engine))
