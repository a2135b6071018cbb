"""A hold on a unix socket: it can be connected to even after its name was removed from disk."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Hold:
    """What `path` leads to is the socket that last had the name; nothing before there is one.

    A descriptor of the file is a way to it as good as its name: whatever cleans up temporary files
    takes the name, and not what has hold of the file.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._fd = os.open("/", os.O_PATH | os.O_CLOEXEC)  # its number is what `path` says
        self.path = f"/proc/self/fd/{self._fd}"

    def look(self) -> bool:
        """Take hold of the socket that has the name now; say whether one has it."""
        try:
            found = os.open(self._socket, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            is_socket = stat.S_ISSOCK(os.fstat(found).st_mode)
            if is_socket and self._fd >= 0:  # else its number is somebody else's by now
                os.dup2(found, self._fd, inheritable=False)
        finally:
            os.close(found)
        return is_socket

    def close(self) -> None:
        """Let go."""
        held, self._fd = self._fd, -1
        os.close(held)
