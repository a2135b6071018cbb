"""What every shape is made of: ours, the engine's, and the one shape of an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from llamactl_supervisor.errors import error
from llamactl_supervisor.fields import validation_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamactl_supervisor.errors import LlamactlError


PROBLEM_TYPE = "application/problem+json"
"""Media type of an answer that is a `Problem`."""


class Wire(BaseModel):
    """Base of our own shapes: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Validate `data`; raise a `LlamactlError` that names the first bad field."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise validation_error(exc.errors(include_url=False, include_input=True)) from None


class EngineDocument(BaseModel):
    """Base of what llama-server says: frozen, unknown keys are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Problem(Wire):
    """The one shape of an error. `code` is stable, `message` is for people."""

    code: str
    message: str
    hint: str | None = None
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, exc: LlamactlError) -> Self:
        """Return the wire form of `exc`."""
        return cls(code=exc.code, message=exc.message, hint=exc.hint, details=exc.details)

    def to_error(self) -> LlamactlError:
        """Return the exception of the class that belongs to the code."""
        return error(self.code, self.message, hint=self.hint, details=self.details)
