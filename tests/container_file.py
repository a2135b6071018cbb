"""What a Containerfile says: its stages, and what a container of the last one is started with."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """One FROM, and the instructions after it with their words, in their order."""

    base: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """Return what follows each instruction of that name."""
        return [words for found, words in self.instructions if found == name]

    def last(self, name: str) -> str:
        """Return what follows the last instruction of that name; it is the one that counts."""
        return self.all(name)[-1]

    @property
    def env(self) -> dict[str, str]:
        """The environment that the image sets."""
        pairs = (pair for words in self.all("ENV") for pair in shlex.split(words))
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def entrypoint(self) -> list[str]:
        """The first words of a container's command."""
        return list(json.loads(self.last("ENTRYPOINT")))

    @property
    def cmd(self) -> list[str]:
        """The rest of them, where a container is given no other."""
        return list(json.loads(self.last("CMD")))

    @property
    def uid(self) -> int:
        """The user, who has to be a number."""
        return int(self.last("USER").split(":")[0])

    @property
    def ports(self) -> set[int]:
        """The ports that it says to listen on."""
        return {int(port) for words in self.all("EXPOSE") for port in words.split()}

    @property
    def copies(self) -> list[tuple[list[str], str, str | None]]:
        """Each COPY: sources, target, and the stage that it is from; None: from the tree."""
        found = []
        for words in map(str.split, self.all("COPY")):
            flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
            *sources, target = (word for word in words if not word.startswith("--"))
            found.append((sources, target, flags.get("from")))
        return found


def stages(path: Path) -> list[Stage]:
    """Read the stages of a Containerfile, the image itself last."""
    lines = (line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    read: list[tuple[str, list[tuple[str, str]]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, words = line.partition(" ")
        if name == "FROM":
            read.append((words, []))
        elif read:
            read[-1][1].append((name, words.strip()))
    return [Stage(base, tuple(instructions)) for base, instructions in read]
