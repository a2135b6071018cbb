"""The tiny models are the same bytes whenever they are made."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_models import GENERATOR, make

if TYPE_CHECKING:
    from tiny_models import TinyModels


def test_made_again_they_are_the_same(tools_dir: Path, tiny: TinyModels) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch)
        make(again, tools_dir / GENERATOR)
        names = sorted(path.name for path in again.iterdir())
        assert names == sorted(path.name for path in tiny.directory.iterdir())
        assert filecmp.cmpfiles(again, tiny.directory, names, shallow=False) == (names, [], [])
