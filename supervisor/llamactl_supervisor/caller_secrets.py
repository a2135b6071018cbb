"""What a caller of `llamactl run` gave as a secret: a file of ours, named by what is in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING

from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llamactl_supervisor.models import ProcessContext
    from llamactl_supervisor.paths import Paths

WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""A variable with one of these in its name holds a secret."""
NOT_SECRET = "_FILE"
"""A variable that ends so names a file, which keeps the secret itself."""


def is_secret(name: str) -> bool:
    """Whether the variable is to be kept out of what is shown and remembered."""
    return any(word in name for word in WORDS) and not name.endswith(NOT_SECRET)


def write(paths: Paths, secrets: Mapping[str, str], keep: Iterable[str | None]) -> str | None:
    """Keep these variables, 0600, and return what names them; None for none.

    Those of earlier callers are forgotten, but for those in `keep`. Raises `state_unwritable`.
    """
    text = json.dumps(dict(sorted(secrets.items())))
    name = hashlib.sha256(text.encode()).hexdigest() if secrets else None
    try:
        for file in paths.secrets.iterdir():
            if file.name not in {name, *keep}:
                file.unlink()
        if name is not None and not (paths.secrets / name).exists():
            new = paths.secrets / f"{name}.new"
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as out:
                out.write(text)
            new.replace(paths.secrets / name)
    except OSError as exc:
        raise error(Code.STATE_UNWRITABLE, f"{paths.secrets}: {exc.strerror}") from exc
    return name


def read(paths: Paths, context: ProcessContext | None) -> dict[str, str]:
    """Return the secret variables that belong to the context. Raises `state_unreadable`."""
    if context is None or context.secrets is None:
        return {}
    path = paths.secrets / context.secrets
    try:
        found: dict[str, str] = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        message = f"the caller's secrets in {path} cannot be read"
        raise error(Code.STATE_UNREADABLE, message, hint="start it again") from exc
    return found
