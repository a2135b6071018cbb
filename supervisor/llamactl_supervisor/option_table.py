"""What llama-server says of its own options and of a command line: the shapes of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llamactl_supervisor.fields import option_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OptionClass = Literal["live", "context", "server", "model"]
"""What a change concerns: the geometry, the contexts, not the model at all, or its weights."""
N_CTX, N_SEQ, KV_UNIFIED = "--ctx-size", "--parallel", "--kv-unified"
ON = "1"


class _Said(BaseModel):
    """Base of what the engine says here: frozen, further keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Option(_Said):
    """One option; `args_neg` are the spellings that turn it off, `arity` is of the others."""

    name: str = Field(pattern="^-")
    args: list[str]
    args_neg: list[str]
    env: str | None
    arity: int = Field(ge=0, le=2)
    kind: OptionClass = Field(alias="class")


class Given(_Said):
    """An option that has a value. `source`: `argv`, an environment variable, a file's path."""

    name: str
    values: list[str]
    source: str


class ArgsAnswer(_Said):
    """All options that the engine has, and those that are given, in the order of their effect."""

    build: str
    options: list[Option] = Field(min_length=1)
    given: list[Given]

    @cached_property
    def _by_spelling(self) -> dict[str, Option]:
        return {arg: option for option in self.options for arg in (*option.args, *option.args_neg)}

    @cached_property
    def classes(self) -> dict[str, OptionClass]:
        """The class of each option, by its name."""
        return {option.name: option.kind for option in self.options}

    def last(self, name: str) -> str | None:
        """Return the value that counts of an option that has one; None where it is not given."""
        found = [each.values for each in self.given if each.name == name and each.values]
        return found[-1][-1] if found else None

    def words(self, argv: Sequence[str]) -> Iterator[Words]:
        """Take a command line apart that the engine has taken: each option with its values."""
        at = 0
        while at < len(argv):
            option = self._by_spelling.get(option_name(argv[at]))
            off = option is not None and option_name(argv[at]) in option.args_neg
            size = 1 if option is None or off else 1 + option.arity
            yield Words(option, tuple(argv[at : at + size]))
            at += size


class DeviceMemory(_Said):
    """Bytes that an engine would take of one device; the host is one of them."""

    name: str
    is_host: bool
    model: int = Field(ge=0)
    context: int = Field(ge=0)
    compute: int = Field(ge=0)
    free: int | None = Field(None, ge=0)
    total: int = Field(ge=0)

    @property
    def n_bytes(self) -> int:
        """All of them."""
        return self.model + self.context + self.compute


class MemoryAnswer(_Said):
    """What an engine would take of each device; `left_out` names what is not counted.

    `n_ctx` in all is what it would choose, or what was asked for as it rounds it.
    """

    n_ctx: int | None = None
    devices: list[DeviceMemory]
    left_out: list[str] = []


@dataclass(frozen=True)
class Words:
    """An option as it was written, its values with it; None: a word that is no option."""

    option: Option | None
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The option's name, or the word."""
        return self.words[0] if self.option is None else self.option.name
