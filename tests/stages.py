"""The stages of `make test` that run tests: each test is of one, by its file or by what it uses."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NEEDS_AN_ENGINE = {"engine_path", "model_path", "tiny", "tools_dir"}
"""The fixtures that compile llama.cpp, or fetch a model to run on it."""


class Stage(StrEnum):
    """A target of the Makefile, and what `pytest --stage` takes."""

    NATIVE = "native"
    PYTHON = "python"
    ENGINE = "engine"
    DOCS = "docs-check"

    @classmethod
    def of(cls, file: Path, fixtures: Iterable[str]) -> Stage:
        """Return the stage of a test: of its file, else by all fixtures below it."""
        uses_engine = not NEEDS_AN_ENGINE.isdisjoint(fixtures)
        return _of_file(file) or (cls.ENGINE if uses_engine else cls.PYTHON)

    def may_be_in(self, file: Path) -> bool:
        """Whether a file may have a test of this stage; known before it is imported."""
        return _of_file(file) == (self if self in WHOLE_FILES else None)


WHOLE_FILES = {
    Stage.NATIVE: ("test_native*.py",),
    Stage.DOCS: ("test_docs.py", "test_describe.py"),
}
"""The stages of subjects: all that is in these files, whatever it uses."""


def _of_file(file: Path) -> Stage | None:
    """Return the stage that all tests of the file are of, if there is one."""
    return next((s for s, names in WHOLE_FILES.items() if any(map(file.match, names))), None)
