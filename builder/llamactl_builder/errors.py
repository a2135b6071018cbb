"""The errors of the builder.

BuilderError
├── SourceError    the pinned source could not be had, or is not the pinned source
├── PatchError     the patch set does not fit the source, or itself
├── ToolError      a program the builder needs is missing or failed
├── BuildError     the engine did not configure, compile or generate a token
└── ModelError     a model file is missing or is not a GGUF
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class BuilderError(Exception):
    """One failure: a stable snake_case `code`, what happened, and what to do about it."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class SourceError(BuilderError):
    """The pinned source could not be had, or is not the pinned source."""


class PatchError(BuilderError):
    """The patch set does not fit the source, or itself."""


class ToolError(BuilderError):
    """A program the builder needs is missing or failed."""


class BuildError(BuilderError):
    """The engine did not configure, compile or generate a token."""


class ModelError(BuilderError):
    """A model file is missing or is not a GGUF."""


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """What the operating system refuses (a full disk, a path of others) becomes a BuilderError."""
    try:
        yield
    except OSError as error:
        raise BuilderError(
            "io_failed",
            f"{doing} failed: {error}.",
            "Check the free space and the permissions there; the cache is where "
            "LLAMACTL_CACHE_DIR says, else in the user's cache directory.",
        ) from error
