"""What this command, and what a llama-server, says that it is."""

from __future__ import annotations

import subprocess
from importlib import metadata

DISTRIBUTION = "llamactl-sidecar"
ANSWER_S = 10.0


def own() -> str:
    """Return the version of this command."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"


def of_engine(path: str, within_s: float = ANSWER_S) -> str | None:
    """Return its version, e.g. `11312 (0c1e570)`; None where it does not run or does not say."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = (done.stdout + done.stderr).splitlines()
    found = (line.removeprefix("version:").strip() for line in said if line.startswith("version:"))
    return next(found, None)
