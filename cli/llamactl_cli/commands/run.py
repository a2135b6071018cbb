"""`llamactl run`, as help lists it; `main` hands it to `shim` before anything is parsed."""

from __future__ import annotations

from typing import Annotated

import typer
from llamactl_supervisor.errors import InvalidRequestError


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="-- llama-server ARGS", help="`run --help` has more.")
    ],
) -> None:
    """Stand in for llama-server: a start with another -c, -np or port takes milliseconds."""
    message = f"run is the first word of its command line: llamactl run {' '.join(words)}"
    raise InvalidRequestError("invalid_request", message)
