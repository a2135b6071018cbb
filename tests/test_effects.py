"""What runs beside the daemon's loop: a bug in it is heard, and a start that hangs ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import events as ev
from llamactl_supervisor import instances, process, procfs
from llamactl_supervisor.effects import Effects
from llamactl_supervisor.models import UpRequest
from llamactl_supervisor.paths import Paths
from llamactl_supervisor.settings import Settings
from machine import REQUEST
from sandbox import FAKE_ENGINE, WITHIN_S, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "0" * 32
STUCK = """
import json, os, sys, time
order = json.loads(sys.stdin.buffer.read())
record = os.environ.get("FAKE_RECORD")
if record:
    open(order["directory"] + "/holder.json", "w").write(record)
time.sleep(600)
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(cache=tmp_path / "c", state=tmp_path / "s", runtime=tmp_path / "r")
    found.create()
    return found


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for an engine, and what would be its holder's record."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def record(child: subprocess.Popen[bytes]) -> str:
    """Return what a holder says of this engine; the holder is this process."""
    engine, me = procfs.identify(child.pid), procfs.identify(os.getpid())
    assert engine is not None
    assert me is not None
    fields = {"instance_id": NAME, "boot_id": me.boot_id}
    fields |= {"holder_pid": str(me.pid), "holder_start_ticks": str(me.start_ticks)}
    fields |= {"engine_pid": str(engine.pid), "engine_start_ticks": str(engine.start_ticks)}
    return json.dumps(fields)


def test_a_bug_in_what_observes_the_engine_is_raised_at_once(
    paths: Paths, engine: subprocess.Popen[bytes]
) -> None:
    """And not kept until the engine ends, which nobody would then find wedged."""

    def post(event: ev.Event) -> None:
        raise ZeroDivisionError(type(event).__name__)

    asked = instances.Asked(generation=1, request=REQUEST, override=None)
    instances.create(paths, NAME, asked)
    (paths.engine_dir(NAME) / "holder.json").write_text(record(engine))
    (paths.engine_dir(NAME) / "pulse").touch()
    found = instances.read(paths, NAME)
    assert found is not None
    watching = Effects(paths, Settings(), post, time.monotonic).watch(ev.Watch(1, found))
    with pytest.raises(ZeroDivisionError, match="Moved"):
        asyncio.run(asyncio.wait_for(watching, WITHIN_S))
    assert engine.poll() is None


@pytest.mark.parametrize("released", [False, True])
def test_a_holder_that_hangs_is_ended_with_what_it_released(
    paths: Paths,
    engine: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    released: bool,
) -> None:
    stuck = tmp_path / "stuck.py"
    stuck.write_text(STUCK)
    monkeypatch.setattr(process, "HOLDER", stuck)
    if released:
        monkeypatch.setenv("FAKE_RECORD", record(engine))
    posted: list[ev.Event] = []
    effects = Effects(paths, Settings(ready_stall_s=3), posted.append, time.monotonic)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    spec = REQUEST.spec.model_copy(update={"model": str(model), "port": free_port()})
    spawn = ev.Spawn(1, NAME, UpRequest(spec=spec, engine_path=str(FAKE_ENGINE)), None)
    asyncio.run(asyncio.wait_for(effects.spawn(spawn, None), WITHIN_S))
    (failed,) = posted
    assert isinstance(failed, ev.SpawnFailed)
    assert failed.problem.code == "engine_spawn_failed"
    assert "it came no further for 3 s and was killed" in failed.problem.message
    assert not paths.engine_dir(NAME).exists()
    assert (engine.wait(WITHIN_S) if released else engine.poll()) == (-9 if released else None)
