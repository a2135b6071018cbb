"""A Debian of its own, made once and booted with its own systemd beside the machine's processes.

The root is a directory in the cache that is never written to: each boot has it under an overlay in
memory. What a test needs of this machine is mounted into it, read-only, below /opt. Never is a
systemd started on the machine's own root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_builder import paths
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUITE = "trixie"
PACKAGES = "systemd,systemd-sysv,dbus,python3,libgomp1,libstdc++6"
"""python3 for the fake engine, and for the libraries that another Python may be linked with."""
TOOLS = ("debootstrap", "systemd-nspawn", "nsenter", "setpriv")
MIRROR_ANSWER_S = 600.0
BOOT_S = 120.0
OFF_S = 30.0
COMMAND_S = 120.0
TREE = Path(__file__).parents[1]
PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
PARTS = ("bench", "builder", "supervisor", "cli", "validate")
PYTHON_PATH = ":".join([*(f"/opt/llamactl/{part}" for part in PARTS), "/opt/packages"])


def make_root() -> Path:
    """Return the root, made where it is not in the cache; skip where it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("booting a systemd of its own takes root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    home = paths.cache_dir() / "systemd-root"
    root, new = home / SUITE, home / f"{SUITE}.new"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            shutil.rmtree(new, ignore_errors=True)
            command = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE)
            made = subprocess.run(
                (*command, str(new), mirror()), capture_output=True, text=True, errors="replace",
                timeout=MIRROR_ANSWER_S, check=False,
            )  # fmt: skip
            if made.returncode != 0:
                last = (made.stdout + made.stderr).strip().splitlines()[-1:]
                pytest.skip(f"a Debian root could not be made: {' '.join(last)}")
            new.rename(root)
    return root


def mirror() -> str:
    """Return where this machine's own packages of Debian come from; skip where they do not."""
    asked = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian")
    if shutil.which(asked[0]) is None:
        pytest.skip("no apt-get here that knows a mirror of Debian")
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    if not told:
        pytest.skip("apt knows no mirror of Debian on this machine")
    return told[0]


def find_leader(nspawn_pid: int) -> int:
    """Return the pid, seen from outside, of what is process 1 in there; 0: there is none yet."""
    for child in psutil.Process(nspawn_pid).children(recursive=True):
        with contextlib.suppress(FileNotFoundError):
            status = Path(f"/proc/{child.pid}/status").read_text()
            if re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE):
                return child.pid
    return 0


def python_mounts() -> dict[str, Path]:
    """Return where this Python and its packages are in a root, to be run as `PYTHON`."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    own = {
        PYTHON: Path(sys.executable).resolve(),
        f"/opt/python/lib/{stdlib.name}": stdlib,
        "/opt/packages": Path(sysconfig.get_path("purelib")),
    }
    libdir, name = map(str, sysconfig.get_config_vars("LIBDIR", "INSTSONAME"))
    if (library := Path(libdir, name)).suffix != ".a" and library.is_file():
        own[f"/usr/lib/{name}"] = library
    return own


class BootedRoot:
    """The machine that was booted. Processes in it are seen from outside, with other pids."""

    def __init__(self, root: Path, mounts: Mapping[str, Path]) -> None:
        binds = [f"--bind-ro={source}:{target}" for target, source in mounts.items()]
        # Ended with this process, however that ends: nspawn then powers its guest off.
        command = ["setpriv", "--pdeathsig=TERM", "systemd-nspawn", "--quiet"]
        command += [f"--directory={root}", "--volatile=overlay", "--register=no", "--keep-unit"]
        command += [f"--machine=llamactl-{os.getpid()}", "--console=pipe", *binds, "--boot"]
        self._nspawn = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            self._leader = until(self._find_leader, within_s=BOOT_S)
            until(self._booted, within_s=BOOT_S)
        except BaseException:
            self.close()
            raise

    def _find_leader(self) -> int:
        self._must_run()
        return find_leader(self._nspawn.pid)

    def _booted(self) -> bool:
        self._must_run()
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in {"running", "degraded"}

    def _must_run(self) -> None:
        """Skip where a container cannot be run at all, as inside of another one."""
        if self._nspawn.poll() is not None:
            assert self._nspawn.stdout is not None
            said = self._nspawn.stdout.read().decode(errors="replace").strip()
            pytest.skip(f"systemd-nspawn does not run here: {said}")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in it as root."""
        inside = ("nsenter", "--target", str(self._leader), "--all", "--", "env", "-i")
        env = ("PATH=/usr/sbin:/usr/bin", f"PYTHONPATH={PYTHON_PATH}")
        done = subprocess.run(
            (*inside, *env, *command), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done

    def write(self, path: str, text: str) -> None:
        """Write a file in it."""
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("sh", "-c", 'printf %s "$1" > "$2"', "sh", text, path)

    def close(self) -> None:
        """Power it off, and wait until nothing of it is left."""
        guests = psutil.Process(self._nspawn.pid).children(recursive=True)
        self._nspawn.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nspawn.wait(OFF_S)
        for guest in guests:
            with contextlib.suppress(psutil.NoSuchProcess):
                guest.kill()
        self._nspawn.kill()
        self._nspawn.communicate()


@contextlib.contextmanager
def booted(mounts: Mapping[str, Path]) -> Iterator[BootedRoot]:
    """Boot it with llamactl in it; `mounts` by where they are in it, below /opt."""
    own = python_mounts() | {"/opt/llamactl": TREE}
    machine = BootedRoot(make_root(), own | dict(mounts))
    with contextlib.closing(machine):
        yield machine
