"""Packages through pip: hash-checked downloads, and tools where the machine has none."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from llamactl_builder.errors import ToolError

if TYPE_CHECKING:
    from pathlib import Path

SAID_LINES_MAX = 12


def download(name: str, version: str, sha256: str, into: Path, *, source: bool) -> Path:
    """Fetch one distribution, its hash enforced by pip; answers the file in `into`."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", "utf-8")
    kind = "--no-binary" if source else "--only-binary"
    _pip(
        "download", "--no-deps", kind, name, "--require-hashes", "-r", str(requirements),
        "--dest", str(into),
    )  # fmt: skip
    requirements.unlink()
    return next(into.iterdir())


def install(packages: list[str], into: Path) -> None:
    """Install packages into a directory of their own."""
    _pip("install", "--only-binary", ":all:", "--target", str(into), *packages)


def _pip(*args: str) -> None:
    common = ("--quiet", "--no-input", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", args[0], *common, *args[1:]],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-SAID_LINES_MAX:])
        raise ToolError("pip_failed", f"pip {args[0]} ended with {done.returncode}:\n{said}")
