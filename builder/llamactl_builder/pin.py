"""The pin (patches/upstream.toml): which upstream source, and the hashes that prove it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl_builder.errors import PatchError

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "upstream.toml"


@dataclass(frozen=True)
class Pin:
    """One upstream commit, the package that carries the same source, and both tree hashes."""

    url: str
    tag: str
    commit: str
    build_number: int
    package: str
    version: str
    package_sha256: str
    package_path: str
    inputs: tuple[str, ...]
    source_sha256: str
    patched_sha256: str


def load(patches: Path) -> Pin:
    """Read the pin out of a patch set directory."""
    path = patches / FILE_NAME
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        upstream, package, tree = data["upstream"], data["package"], data["tree"]
        return Pin(
            url=upstream["url"],
            tag=upstream["tag"],
            commit=upstream["commit"],
            build_number=upstream["build_number"],
            package=package["name"],
            version=package["version"],
            package_sha256=package["sha256"],
            package_path=package["path"],
            inputs=tuple(tree["inputs"]),
            source_sha256=tree["source_sha256"],
            patched_sha256=tree["patched_sha256"],
        )
    except OSError as error:
        raise PatchError(
            "pin_unreadable", f"Cannot read the pin {path}: {error.strerror}."
        ) from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchError("pin_invalid", f"The pin {path} is not valid: {error!r}.") from error


def record(patches: Path, key: str, value: str) -> bool:
    """Write one of the two tree hashes, leaving every other byte as it is; True if it changed."""
    path = patches / FILE_NAME
    text = path.read_text("utf-8")
    new, found = re.subn(rf'^{key} = "[^"]*"$', f'{key} = "{value}"', text, flags=re.MULTILINE)
    if found != 1:
        raise PatchError("pin_invalid", f'{path} needs exactly one line `{key} = "…"`.')
    if new != text:
        path.write_text(new, "utf-8")
    return new != text
