"""A daemon with a configuration file: what it starts, and what a reload of it does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineState, Geometry, ReloadResult
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Configured(Sandbox):
    """A sandbox whose daemon is configured by a file."""

    @property
    def file(self) -> Path:
        """The file."""
        return self.root / "config.toml"

    def write(self, *fake: str, daemon: str = "", **engine: Any) -> None:
        """Write the file: the fake engine with these misbehaviours."""
        table = {"model": "model.gguf", "engine_path": str(FAKE_ENGINE), "port": self.port}
        table |= {"extra_args": list(fake)} | engine
        lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
        self.file.touch(0o600)
        self.file.write_text("\n".join(["[engine]", *lines, "[daemon]", daemon]))

    def serve(self, *arguments: str) -> None:
        """Start a daemon and wait until its engine is ready."""
        self.start("--config", str(self.file), *arguments)
        self.until_state(EngineState.READY)

    def reload(self) -> ReloadResult:
        """Reload and return what it came to."""
        ended = self.client.wait_operation(self.client.reload(), timeout_s=WITHIN_S)
        assert isinstance(ended.result, ReloadResult)
        return ended.result

    def reload_refused(self) -> LlamactlError:
        """Reload and return why it came to nothing."""
        with pytest.raises(LlamactlError) as caught:
            self.reload()
        return caught.value

    def geometry(self) -> Geometry:
        """Return the running engine's geometry."""
        engine = self.client.status().engine
        assert engine is not None
        assert engine.geometry is not None
        return engine.geometry


@pytest.fixture
def box() -> Iterator[Configured]:
    sandbox = Configured(stop_term_s=2)
    sandbox.write()
    yield sandbox
    sandbox.close()


def test_the_configured_engine_comes_up_with_its_daemon_and_says_why(box: Configured) -> None:
    box.serve()
    assert box.geometry().n_ctx == 16384
    line = json.loads(box.paths.ledger_file.read_text())
    assert (line["cause"], line["by"], line["model"]) == ("config", "daemon", str(box.model))


def test_without_resume_nothing_is_started(box: Configured) -> None:
    box.start("--config", str(box.file), "--no-resume")
    assert box.client.status().state is EngineState.STOPPED


def test_a_model_without_a_llama_server_is_told_at_the_start(box: Configured) -> None:
    box.write()
    text = box.file.read_text().replace("engine_path", "#engine_path")
    box.file.write_text(text)
    assert box.spawn("--config", str(box.file)).wait(WITHIN_S) == 2
    assert (
        "config_invalid: engine.model is configured, engine.engine_path is not" in box.daemon_log()
    )
    assert "llamactl build" in box.daemon_log()


def test_a_broken_file_is_told_at_the_start(box: Configured) -> None:
    box.write(n_ctxx=1)
    assert box.spawn("--config", str(box.file)).wait(WITHIN_S) == 2
    assert f"config_invalid: file {box.file}: 'n_ctxx' is no key in [engine]" in box.daemon_log()
    assert "did you mean 'n_ctx'?" in box.daemon_log()


def test_a_reload_changes_the_geometry_live(box: Configured) -> None:
    box.serve()
    pid = box.engine_pid()
    assert box.reload() == ReloadResult(unchanged=True)
    box.write(n_ctx="128k", n_seq=4)
    result = box.reload()
    assert [change.field for change in result.applied] == ["engine.n_ctx", "engine.n_seq"]
    assert result.receipt is not None
    assert (box.geometry().n_ctx, box.geometry().n_seq) == (131072, 4)
    status = box.client.status()
    assert (box.engine_pid(), status.override, status.unapplied) == (pid, None, ())
    assert (status.weight_loads, status.loads_avoided) == (1, 1)
    assert 'llamactl_reconfigures_total{outcome="applied"} 1.0' in box.metrics()
    assert box.reload() == ReloadResult(unchanged=True)


def test_a_refused_reload_is_tried_again_by_the_next(box: Configured) -> None:
    box.write("--fake-refuse", "insufficient_memory")
    box.serve()
    box.write("--fake-refuse", "insufficient_memory", n_ctx=65536)
    found = box.reload_refused()
    assert (found.code, found.exit_code) == ("insufficient_memory", 5)
    status = box.client.status()
    assert status.desired is not None
    assert (status.state, status.desired.spec.n_ctx) == (EngineState.READY, 16384)
    assert box.geometry().n_ctx == 16384
    assert box.reload().applied[0].field == "engine.n_ctx"
    assert box.geometry().n_ctx == 65536


def test_a_broken_file_is_refused_and_changes_nothing(box: Configured) -> None:
    box.serve()
    box.write(n_ctx="big")
    found = box.reload_refused()
    assert (found.code, found.exit_code) == ("config_refused", 5)
    assert found.message.startswith(f"file {box.file}, engine.n_ctx='big': ")
    assert found.details["reason"] == "config_invalid"
    box.file.chmod(0o666)
    assert box.reload_refused().details["reason"] == "config_insecure"
    box.file.unlink()
    assert "No such file" in box.reload_refused().message
    assert box.geometry().n_ctx == 16384
    assert box.client.status().state is EngineState.READY


def test_a_cold_field_waits_for_the_restart_of_the_engine(box: Configured) -> None:
    box.serve()
    pid = box.engine_pid()
    old_port = box.port
    box.port = free_port()
    box.write()
    result = box.reload()
    assert [change.field for change in result.needs_restart] == ["engine.port"]
    status = box.client.status()
    assert status.engine is not None
    assert (status.engine.pid, status.engine.url) == (pid, f"http://127.0.0.1:{old_port}")
    assert status.unapplied == result.needs_restart
    assert "engine.port is " in box.daemon_log()
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    status = box.client.status()
    assert status.engine is not None
    assert (status.engine.url, status.unapplied) == (f"http://127.0.0.1:{box.port}", ())


def test_a_hangup_is_a_reload(box: Configured) -> None:
    daemon = box.start("--config", str(box.file))
    box.until_state(EngineState.READY)
    box.write(n_seq=4)
    daemon.send_signal(signal.SIGHUP)
    until(lambda: box.geometry().n_seq == 4)
    assert f"reload of {box.file} by SIGHUP" in box.daemon_log()
    assert "reloaded engine.n_seq=4, was 2" in until(
        lambda: box.daemon_log() if "reloaded" in box.daemon_log() else ""
    )
    box.write(nonsense=1)
    daemon.send_signal(signal.SIGHUP)
    until(lambda: "not reloaded, the old configuration stays" in box.daemon_log())
    assert box.geometry().n_seq == 4


def test_settings_hold_at_once(box: Configured) -> None:
    del box.env["LLAMACTL_STOP_TERM_S"]
    box.write("--fake-ignore-term", daemon="stop_term_s = 300")
    box.serve()
    box.write("--fake-ignore-term", daemon="stop_term_s = 0.2\nclose_s = 1")
    result = box.reload()
    assert [change.field for change in result.applied] == ["daemon.stop_term_s"]
    assert [change.field for change in result.needs_restart] == ["daemon.close_s"]
    assert box.client.status().unapplied == result.needs_restart
    box.write("--fake-ignore-term", daemon="stop_term_s = 0.2\n[api]\nprobes_listen = '[::1]:9'")
    (late,) = box.reload().needs_restart
    assert (late.field, late.before, late.after) == ("api.probes_listen", None, "[::1]:9")
    assert box.client.status().unapplied == (late,)
    said = 'api.probes_listen is absent until the daemon is restarted: configured as "[::1]:9"'
    assert said in box.daemon_log()
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)


def test_an_engine_that_outlives_its_daemon_is_left_as_it_is_until_a_reload(
    box: Configured,
) -> None:
    box.serve()
    pid = box.engine_pid()
    box.daemons[0].kill()
    box.daemons[0].wait(WITHIN_S)
    box.write("--fake-busy", n_ctx=32768)
    box.serve()
    assert (box.engine_pid(), box.geometry().n_ctx) == (pid, 16384)
    fields = {change.field for change in box.client.status().unapplied}
    assert fields == {"engine.n_ctx", "engine.extra_args"}
    assert "engine.extra_args is" in box.daemon_log()
    result = box.reload()
    assert [change.field for change in result.applied] == ["engine.n_ctx"]
    assert [change.field for change in result.needs_restart] == ["engine.extra_args"]
    assert (box.engine_pid(), box.geometry().n_ctx) == (pid, 32768)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_change_that_no_engine_could_be_started_with_is_refused(
    box: Configured, *, stopped: bool
) -> None:
    box.serve()
    if stopped:
        box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    box.write("--no-such-option")
    problem = box.reload_refused()
    assert (problem.code, problem.exit_code) == ("config_refused", 5)
    assert "does not take its command line" in problem.message
    if stopped:
        box.client.wait_operation(box.client.start(), timeout_s=WITHIN_S)
    else:
        os.kill(box.engine_pid(), signal.SIGKILL)
        until(lambda: box.client.status().generation == 2)
    box.until_state(EngineState.READY)


def test_a_stopped_engine_takes_it_at_its_next_start(box: Configured) -> None:
    box.serve()
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    box.write(n_ctx=32768)
    assert [change.field for change in box.reload().applied] == ["engine.n_ctx"]
    assert box.client.status().state is EngineState.STOPPED
    box.client.wait_operation(box.client.start(), timeout_s=WITHIN_S)
    assert box.geometry().n_ctx == 32768


def claimed(box: Configured) -> bool:
    """Whether status and metrics say that the file as it is now is in force."""
    config, text = box.client.status().config, box.metrics()
    assert config is not None
    wanted = hashlib.sha256(box.file.read_bytes()).hexdigest()
    (hashed,) = re.findall(r"^llamactl_config_hash (\S+)$", text, re.MULTILINE)
    is_hash = float(hashed) == int(wanted[:12], 16)
    said = {config.digest == wanted, is_hash, "llamactl_config_ok 1.0" in text}
    assert len(said) == 1
    return said.pop()


def test_a_file_is_in_force_once_all_of_it_is(box: Configured) -> None:
    box.write(n_seq=3, kv_unified=False)
    box.serve()
    assert claimed(box)
    box.write(n_seq=4, kv_unified=False)
    assert box.reload().needs_restart == ()
    assert claimed(box)
    box.write("--threads", "3", n_seq=4, kv_unified=False)
    assert box.reload().needs_restart != ()
    assert not claimed(box), "it waits for a restart"
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert claimed(box)
    by_hand = box.client.reconfigure(n_seq=5)
    box.client.wait_operation(by_hand, timeout_s=WITHIN_S)
    assert not claimed(box), "it was changed by hand"
    box.client.wait_operation(box.client.reconfigure(n_seq=4), timeout_s=WITHIN_S)
    assert claimed(box)
    box.write("--threads", "3", daemon="close_s = 7", n_seq=4, kv_unified=False)
    box.reload()
    assert not claimed(box), "of [daemon] some waits for the next one"


def test_a_file_that_an_adopted_engine_does_not_have_is_not_in_force(box: Configured) -> None:
    box.write(n_seq=3)
    box.serve()
    for n_ctx in (32768, 16384):
        box.kill_daemon()
        box.write(n_ctx=n_ctx)
        box.serve()
        assert not claimed(box)
        box.reload()
        assert claimed(box)


def test_an_engine_that_was_asked_for_by_flags_is_not_of_the_file(box: Configured) -> None:
    box.write(n_seq=3)
    box.start("--config", str(box.file), "--no-resume")
    assert claimed(box), "the next start is of it"
    box.up()
    assert not claimed(box)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    assert not claimed(box), "nor is the next start"
