"""The container of deploy/Containerfile as far as a machine without a container runtime has it.

Process 1 is the image's own entrypoint, in namespaces of its own, as the image's user, without
capabilities, with the image's environment, and volumes as the kubelet makes them. What stands in:
the root is a Debian from the cache, llamactl is this tree under this Python, the engine a fake one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from booted_root import PYTHON, TREE, find_leader, make_root, python_mounts
from container_file import stages
from sandbox import FAKE_ENGINE, WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGE = stages(TREE / "deploy" / "Containerfile")[-1]
CONFIG = (TREE / "deploy" / "config" / "config.toml").read_text()
INIT = "/usr/bin/tini-static"
"""Debian's tini, of this machine: it needs no library of the root."""
PARTS = ("bench", "builder", "supervisor", "cli", "validate")
PACKAGES = ":".join([*(f"/opt/tree/{part}" for part in PARTS), "/opt/packages"])
COMMAND = f'#!/bin/sh\nPYTHONPATH={PACKAGES} exec {PYTHON} -P -m llamactl_cli "$@"\n'
THREADS = 'extra_args = ["--threads", "4"]'


class Container:
    """Volumes that stay, and one container at a time on them."""

    def __init__(self) -> None:
        self._root = make_root()
        if not Path(INIT).exists():
            pytest.skip(f"not installed: tini ({INIT})")
        self.home = Path(tempfile.mkdtemp(prefix="llamactl-"))
        self.port, self.probes_port = free_port(), free_port()
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0
        for name in ("state", "run", "models", "config", "bin"):
            (self.home / name).mkdir()
        # What the kubelet makes of a new claim and of an emptyDir, with fsGroup.
        for name, mode in (("state", 0o2775), ("run", 0o2777)):
            os.chown(self.home / name, 0, IMAGE.uid)
            (self.home / name).chmod(mode)
        (self.home / "models" / "model.gguf").write_bytes(b"GGUF")
        (self.home / "bin" / "llamactl").write_text(COMMAND)
        (self.home / "bin" / "llamactl").chmod(0o755)
        self.configure()

    def configure(self, *fake: str, **changed: object) -> None:
        """Bring a configuration into the volume: the one that we ship, with other ports.

        As the kubelet does it: a directory that is new, then a link to it in place of the old one.
        """
        text = CONFIG.replace("port = 8080", f"port = {self.port}")
        text = text.replace("0.0.0.0:9090", f"0.0.0.0:{self.probes_port}")
        text = text.replace(THREADS, f"extra_args = {json.dumps(fake)}")
        for name, value in changed.items():
            lines = text.splitlines()
            (found,) = (n for n, line in enumerate(lines) if line.startswith(f"{name} = "))
            lines[found] = f"{name} = {json.dumps(value)}"
            text = "\n".join(lines)
        volume = self.home / "config"
        version = Path(tempfile.mkdtemp(prefix="..", dir=volume))
        version.chmod(0o755)
        (version / "config.toml").write_text(text)
        (version / "config.toml").chmod(0o444)
        os.chown(version / "config.toml", 0, IMAGE.uid)
        old = (volume / "..data").readlink() if (volume / "..data").is_symlink() else None
        (volume / "..data_tmp").symlink_to(version.name)
        (volume / "..data_tmp").rename(volume / "..data")
        if old is not None:
            shutil.rmtree(volume / old)
        else:
            (volume / "config.toml").symlink_to("..data/config.toml")

    def start(self) -> None:
        """Start it, and wait for nothing."""
        mounts = python_mounts() | {
            "/etc/llamactl": self.home / "config",
            "/models": self.home / "models",
            "/opt/tree": TREE,
            "/opt/llamactl/bin/respawn": TREE / "deploy" / "respawn",
            "/opt/llamactl/bin/llamactl": self.home / "bin" / "llamactl",
            "/opt/engine/llama-server": FAKE_ENGINE,
            IMAGE.entrypoint[0]: Path(INIT),
        }
        command = ["setpriv", "--pdeathsig=KILL", "systemd-nspawn", "--quiet", "--keep-unit"]
        command += [f"--directory={self._root}", "--volatile=overlay", "--register=no"]
        command += [f"--machine=llamactl-{os.getpid()}", "--console=pipe"]
        command += [f"--bind-ro={source}:{target}" for target, source in mounts.items()]
        command += [f"--bind={self.home}/state:/var/lib/llamactl"]
        command += [f"--bind={self.home}/run:/run/llamactl"]
        with self.log.open("ab") as log:
            self._nspawn = subprocess.Popen(
                [*command, "--", *self._as_user, *IMAGE.entrypoint, *IMAGE.cmd],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.leader = until(self._find_leader)

    @property
    def log(self) -> Path:
        """What it wrote, all containers on these volumes together."""
        return self.home / "log"

    @property
    def _as_user(self) -> Sequence[str]:
        user = [f"--{name}={IMAGE.uid}" for name in ("reuid", "regid", "groups")]
        dropped = [f"--{which}=-all" for which in ("bounding-set", "inh-caps", "ambient-caps")]
        env = (f"{name}={value}" for name, value in IMAGE.env.items())
        return ("setpriv", *user, *dropped, "--no-new-privs", "env", "-i", *env)

    def _find_leader(self) -> int:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            pytest.skip(f"systemd-nspawn does not run here: {self.log.read_text()}")
        return find_leader(self._nspawn.pid)

    def until_ready(self) -> None:
        """Wait until the readiness probe says so."""

        def serves() -> bool:
            assert self._nspawn is not None
            assert self._nspawn.poll() is None, self.log.read_text()
            return self.probe("/readyz") == 200

        until(serves)

    def probe(self, path: str) -> int:
        """Ask as the kubelet does; return the status, 0 where nobody answers."""
        try:
            return httpx.get(
                f"http://127.0.0.1:{self.probes_port}{path}", timeout=WITHIN_S
            ).status_code
        except httpx.TransportError:
            return 0

    def metrics(self) -> str:
        """Return the metrics, as Prometheus reads them."""
        return httpx.get(f"http://127.0.0.1:{self.probes_port}/metrics", timeout=WITHIN_S).text

    def llamactl(self, *words: str) -> Any:
        """Run the command in it, as `kubectl exec` would; return its JSON."""
        return json.loads(self.inside("llamactl", "--json", *words))

    def inside(self, *command: str) -> str:
        """Run a command in it as its user; return its output."""
        inside = ("nsenter", "--target", str(self.leader), "--all", "--", *self._as_user)
        done = subprocess.run(
            (*inside, *command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN_S,
            check=False,
        )  # fmt: skip
        return done.stdout or done.stderr

    def signal(self, number: int) -> None:
        """Send a signal to its process 1, as a runtime does."""
        os.kill(self.leader, number)

    def exit_status(self, within_s: float = WITHIN_S) -> int:
        """Wait for its end; return its exit status."""
        assert self._nspawn is not None
        return self._nspawn.wait(within_s)

    def processes(self) -> list[psutil.Process]:
        """Return every process in it, process 1 and zombies included."""

        def space(pid: int) -> Path:
            return Path(f"/proc/{pid}/ns/pid").readlink()

        ours, found = space(self.leader), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if space(process.pid) == ours:
                    found.append(process)
        return found

    def pid_of(self, *words: str) -> int:
        """Return the pid, seen from outside, of the process with all these words; 0 for none."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if process.uids().real == IMAGE.uid and all(word in command for word in words):
                    return process.pid
        return 0

    def zombies(self) -> list[int]:
        """Return the pids of what has ended and was waited for by nobody."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def capabilities(self) -> set[int]:
        """Return the sets of capabilities, each as a number, that any process has."""
        found = set()
        for process in self.processes():
            status = Path(f"/proc/{process.pid}/status").read_text()
            lines = (line.split() for line in status.splitlines() if line.startswith("Cap"))
            found |= {int(bits, 16) for _, bits in lines}
        return found

    def close(self) -> None:
        """End it, and remove its volumes."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            for process in psutil.Process(self._nspawn.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._nspawn.wait(WITHIN_S)
        shutil.rmtree(self.home)
