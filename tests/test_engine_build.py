"""The real engine, built from the pin and the patch set, with the default model."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from llamactl_builder import build, paths, pin, probe

if TYPE_CHECKING:
    from pathlib import Path


def test_it_says_which_upstream_it_is(engine_path: Path) -> None:
    the_pin = pin.load(paths.patches_dir())
    said = subprocess.run([engine_path, "--version"], capture_output=True, text=True, check=True)
    assert the_pin.tag.removeprefix("b") in said.stderr + said.stdout
    assert the_pin.commit[:7] in said.stderr + said.stdout


def test_it_generates_a_token(engine_path: Path, model_path: Path) -> None:
    probe.generate_token(engine_path, model_path)


def test_it_is_not_built_twice(engine_path: Path) -> None:
    again = build.ensure_engine()
    assert (again.path, again.cached, again.patched) == (engine_path, True, True)
    record = json.loads((engine_path.parent / "build.json").read_text())
    assert record["commit"] == pin.load(paths.patches_dir()).commit
