"""Identity: a pid alone is nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from llamactl_supervisor.process import Process, send
from llamactl_supervisor.procfs import alive, identify
from sandbox import WITHIN_S


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def test_we_are_who_we_are() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.pid == os.getpid()
    assert alive(me)


def test_a_reused_pid_is_somebody_else() -> None:
    """Same pid, another start or another boot: not used, not signalled."""
    with sleeper() as child:
        real = identify(child.pid)
        assert real is not None
        earlier = real.model_copy(update={"start_ticks": real.start_ticks - 1})
        last_boot = real.model_copy(update={"boot_id": "another"})
        for stranger in (earlier, last_boot):
            assert not alive(stranger)
            assert Process.open(stranger) is None
            assert not send(stranger, signal.SIGKILL)
        assert child.poll() is None
        assert send(real, signal.SIGKILL)
        assert child.wait(WITHIN_S) == -signal.SIGKILL
        assert not send(real, signal.SIGKILL)


def test_a_zombie_is_gone() -> None:
    with sleeper() as child:
        real = identify(child.pid)
        assert real is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identify(child.pid) is None
        assert not alive(real)


def test_an_end_is_noticed() -> None:
    async def watch(child: subprocess.Popen[bytes]) -> None:
        identity = identify(child.pid)
        assert identity is not None
        process = Process.open(identity)
        assert process is not None
        gone = asyncio.create_task(process.gone())
        process.send(signal.SIGKILL)
        await asyncio.wait_for(gone, WITHIN_S)
        process.send(signal.SIGKILL)
        process.close()

    with sleeper() as child:
        asyncio.run(watch(child))
