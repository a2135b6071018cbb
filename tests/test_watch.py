"""A configuration file that is followed as it changes: by hand, by rename, by Kubernetes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from llamactl_supervisor.errors import RefusedError
from llamactl_supervisor.following import PASSING, cause
from llamactl_supervisor.models import ApplyRequest, EngineState, Problem, Status
from llamactl_supervisor.watch import Seen, Watch
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def settled(watch: Watch, path: Path | None) -> bool:
    """Look until two looks are alike; return whether that is a change."""
    while (seen := watch.look(path)) is Seen.UNSETTLED:
        pass
    return seen is Seen.CHANGED


def test_a_file_has_changed_when_what_it_holds_has(tmp_path: Path) -> None:
    file, watch = tmp_path / "f", Watch(None)
    assert not settled(watch, file)
    file.write_text("one")
    assert settled(watch, file)
    assert not settled(watch, file)
    os.utime(file, ns=(1, 1))
    assert not settled(watch, file)
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").replace(file)
    assert settled(watch, file)
    file.unlink()
    assert settled(watch, file)
    assert not settled(watch, None)


def test_a_file_that_is_being_written_has_not_changed_yet(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("one")
    watch = Watch(hashlib.sha256(b"one").hexdigest())
    assert not settled(watch, file)
    for text in ("", "t", "tw", "two"):
        file.write_text(text)
        assert watch.look(file) is Seen.UNSETTLED, text
    assert watch.look(file) is Seen.CHANGED
    assert watch.digest == hashlib.sha256(b"two").hexdigest()
    for text in ("", "two"):
        file.write_text(text)
        assert watch.look(file) is Seen.UNSETTLED, text
    assert watch.look(file) is Seen.SAME


class Mounted(Sandbox):
    """A daemon whose configuration is mounted as Kubernetes mounts a ConfigMap."""

    def __init__(self) -> None:
        super().__init__(stop_term_s=2, watch_poll_s=0.05)
        self.mount = self.root / "etc"
        self.mount.mkdir()
        self.versions = 0
        (self.mount / "config.toml").symlink_to("..data/config.toml")

    def write(self, text: str | None = None, **engine: object) -> None:
        """Put a new version in place, all of it at once."""
        self.versions += 1
        directory = self.mount / f"..version_{self.versions}"
        directory.mkdir()
        table = {"model": str(self.model), "engine_path": str(FAKE_ENGINE), "port": self.port}
        lines = [f"{name} = {json.dumps(value)}" for name, value in (table | engine).items()]
        (directory / "config.toml").write_text(
            "\n".join(["[engine]", *lines]) if text is None else text
        )
        (self.mount / "..data_tmp").symlink_to(directory.name)
        (self.mount / "..data_tmp").replace(self.mount / "..data")

    def until_config(self, *, problem: str | None, was: str | None) -> Status:
        """Wait until another file than `was` is in force, or until it is said why not."""

        def there() -> Status | None:
            status = self.client.status()
            config = status.config
            assert config is not None
            code = None if config.problem is None else config.problem.code
            new = problem is not None or config.digest not in {None, was}
            return status if new and code == problem else None

        status = until(there, within_s=WITHIN_S)
        assert status is not None
        return status


@pytest.fixture
def box() -> Iterator[Mounted]:
    sandbox = Mounted()
    sandbox.write()
    sandbox.start("--config", str(sandbox.mount / "config.toml"), "--watch")
    sandbox.until_state(EngineState.READY)
    yield sandbox
    sandbox.close()


def digest(status: Status) -> str | None:
    assert status.config is not None
    return status.config.digest


def test_a_change_is_applied_live_or_by_a_relaunch_and_seen_to_be_in_force(box: Mounted) -> None:
    pid, first = box.engine_pid(), digest(box.client.status())
    assert first is not None
    (hashed,) = re.findall(r"^llamactl_config_hash (\S+)$", box.metrics(), re.MULTILINE)
    assert float(hashed) == int(first[:12], 16)
    box.write(n_seq=3)
    status = box.until_config(problem=None, was=first)
    assert status.engine is not None
    assert status.engine.geometry is not None
    assert (status.engine.geometry.n_seq, status.engine.pid) == (3, pid)
    box.write(n_seq=3, extra_args=["--threads", "3"])
    status = box.until_config(problem=None, was=digest(status))
    assert status.desired is not None
    assert status.desired.spec.extra_args == ("--threads", "3")
    assert box.engine_pid() != pid
    assert status.unapplied == ()


@pytest.mark.parametrize(
    ("text", "engine", "code"),
    [
        ("[engine\n", {}, "config_refused"),
        ("[engine]\nn_cxt = 1\n", {}, "config_refused"),
        ("", {}, "config_refused"),
        ("[engine]\n", {}, "config_refused"),
        ("[engine]\nport = 8080\n", {}, "config_refused"),
        (None, {"extra_args": ["--no-such"]}, "apply_refused"),
        (None, {"model": "/no/model"}, "apply_refused"),
        (None, {"extra_args": ["--fake-needs", str(2**60)]}, "insufficient_memory"),
    ],
)
def test_what_cannot_be_is_reported_and_changes_nothing(
    box: Mounted, text: str | None, engine: dict[str, object], code: str
) -> None:
    pid, before = box.engine_pid(), box.client.status()
    box.write(text, **engine)
    status = box.until_config(problem=code, was=digest(before))
    assert digest(status) == digest(before)
    assert (status.desired, status.generation) == (before.desired, before.generation)
    assert "llamactl_config_ok 0.0" in box.metrics()
    assert box.engine_pid() == pid
    box.write()
    until(lambda: "llamactl_config_ok 1.0" in box.metrics())
    assert digest(box.client.status()) == digest(before)
    box.write(n_seq=3)
    assert digest(box.until_config(problem=None, was=digest(before))) is not None
    assert box.engine_pid() == pid


def test_what_was_changed_by_hand_stays_until_the_file_says_another(box: Mounted) -> None:
    first = digest(box.client.status())
    changed = box.client.reconfigure(n_ctx=32768)
    box.client.wait_operation(changed, timeout_s=WITHIN_S)
    box.write(n_seq=3)
    status = box.until_config(problem=None, was=first)
    assert status.desired is not None
    assert (status.desired.spec.n_ctx, status.desired.spec.n_seq) == (32768, 3)


def test_a_change_while_the_engine_is_stopped_is_for_its_next_start(box: Mounted) -> None:
    first = digest(box.client.status())
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    box.write(extra_args=["--threads", "3"])
    status = box.until_config(problem=None, was=first)
    assert status.state is EngineState.STOPPED
    assert status.desired is not None
    assert status.desired.spec.extra_args == ("--threads", "3")


def test_what_comes_while_another_change_is_applied_is_applied_after_it(box: Mounted) -> None:
    first = digest(box.client.status())
    box.write(extra_args=["--fake-load-s", "1"])
    box.until_state(EngineState.STARTING)
    box.write(extra_args=["--threads", "3"])
    wanted = hashlib.sha256((box.mount / "config.toml").read_bytes()).hexdigest()
    until(lambda: digest(box.client.status()) == wanted)
    status = box.client.status()
    assert (wanted != first, status.unapplied) == (True, ())
    argv = psutil.Process(box.engine_pid()).cmdline()
    assert argv[argv.index("--threads") + 1] == "3"


def test_a_file_of_nothing_says_why_it_is_not_followed_until_the_engine_is_stopped(
    box: Mounted,
) -> None:
    box.write("")
    config = box.until_config(problem="config_refused", was=None).config
    assert config is not None
    assert config.problem is not None
    assert config.problem.message.endswith(
        "says nothing, and an engine is up that it was written for"
    )
    with pytest.raises(RefusedError, match="says nothing"):
        box.client.wait_operation(box.client.reload(), timeout_s=WITHIN_S)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
    box.client.wait_operation(box.client.reload(), timeout_s=WITHIN_S)
    assert digest(box.client.status()) == hashlib.sha256(b"").hexdigest()


def again(box: Mounted) -> None:
    """Have another daemon adopt the engine, of which the one before was killed."""
    box.start("--config", str(box.mount / "config.toml"), "--watch")
    box.until_state(EngineState.READY)


def of_file(box: Mounted) -> str:
    return hashlib.sha256((box.mount / "config.toml").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("engine", "stays"), [({"n_seq": 5}, True), ({"extra_args": ["--threads", "3"]}, False)]
)
def test_a_change_while_no_daemon_looked_is_followed_by_the_next(
    box: Mounted, engine: dict[str, Any], stays: bool
) -> None:
    pid = box.engine_pid()
    box.kill_daemon()
    box.write(**engine)
    again(box)
    until(lambda: digest(box.client.status()) == of_file(box))
    status = box.client.status()
    assert status.desired is not None
    wanted = status.desired.spec.model_dump(mode="json")
    assert {name: wanted[name] for name in engine} == engine
    assert (box.engine_pid() == pid, status.unapplied) == (stays, ())
    assert "llamactl_config_ok 1.0" in box.metrics()


@pytest.mark.parametrize(
    ("text", "engine", "code"),
    [
        ("", {}, "config_refused"),
        ("[engine]\nport = 8080\n", {}, "config_refused"),
        (None, {"extra_args": ["--no-such"]}, "apply_refused"),
        (None, {"extra_args": ["--fake-needs", str(2**60)]}, "insufficient_memory"),
    ],
)
def test_what_cannot_be_is_not_in_force_under_the_next_daemon_either(
    box: Mounted, text: str | None, engine: dict[str, object], code: str
) -> None:
    pid, before = box.engine_pid(), box.client.status()
    box.kill_daemon()
    box.write(text, **engine)
    again(box)
    status = box.until_config(problem=code, was=None)
    assert digest(status) is None
    assert "llamactl_config_ok 0.0" in box.metrics()
    assert "llamactl_config_hash 0.0" in box.metrics()
    assert (status.desired, box.engine_pid()) == (before.desired, pid)
    box.write()
    until(lambda: digest(box.client.status()) == of_file(box))
    assert box.engine_pid() == pid


def test_what_was_changed_by_hand_stays_under_the_next_daemon(box: Mounted) -> None:
    box.write(n_seq=3)
    until(lambda: digest(box.client.status()) == of_file(box))
    asked = ApplyRequest.parse({"engine": {"n_seq": 4}})
    box.client.wait_operation(box.client.apply(asked), timeout_s=WITHIN_S)
    assert digest(box.client.status()) is None, "of the file, n_seq is not in force"
    box.kill_daemon()
    again(box)
    looks = time.monotonic() + 1.0
    until(lambda: time.monotonic() > looks)
    status = box.client.status()
    assert status.desired is not None
    assert (status.desired.spec.n_seq, digest(status)) == (4, None)
    assert "llamactl_config_ok 0.0" in box.metrics()
    box.write(n_seq=2)
    until(lambda: digest(box.client.status()) == of_file(box))


def test_what_a_reload_has_left_for_a_restart_is_not_left_by_a_watch(box: Mounted) -> None:
    pid = box.engine_pid()
    box.kill_daemon()
    box.start("--config", str(box.mount / "config.toml"))
    box.until_state(EngineState.READY)
    box.write(extra_args=["--threads", "3"])
    box.client.wait_operation(box.client.reload(), timeout_s=WITHIN_S)
    assert (digest(box.client.status()), box.engine_pid()) == (None, pid)
    box.kill_daemon()
    again(box)
    until(lambda: digest(box.client.status()) == of_file(box))
    assert box.engine_pid() != pid


def told(box: Mounted) -> list[str]:
    return [line for line in box.daemon_log().splitlines() if "is not followed" in line]


def test_what_may_pass_is_tried_again_and_told_once(box: Mounted) -> None:
    first = digest(box.client.status())
    with socket.create_server(("127.0.0.1", free_port())) as stranger:
        port = stranger.getsockname()[1]
        box.write(port=port)
        refused = box.until_config(problem="apply_refused", was=first)
        assert refused.config is not None
        assert refused.config.problem is not None
        assert refused.config.problem.details["reason"] == "port_in_use"
        until(lambda: tries(box) >= 3)
        assert len(told(box)) == 1
    status = box.until_config(problem=None, was=first)
    assert status.desired is not None
    assert status.desired.spec.port == port


def tries(box: Mounted) -> float:
    found = re.search(r'kind="apply",outcome="failed"} (\S+)', box.metrics())
    return 0.0 if found is None else float(found[1])


def test_what_cannot_pass_is_not_tried_until_the_file_is_another(box: Mounted) -> None:
    first = digest(box.client.status())
    asked = box.root / "asked"
    engine = box.root / "engine"
    engine.write_text(f'#!/bin/sh\necho >> {asked}\nexec {FAKE_ENGINE} "$@"\n')
    engine.chmod(0o700)
    box.write(engine_path=str(engine), extra_args=["--no-such"])
    box.until_config(problem="apply_refused", was=first)
    until(lambda: len(told(box)) == 1)
    before = asked.read_text(), tries(box)
    left = time.monotonic() + 1.0  # twenty looks; a slow machine has fewer, and is not wrong
    until(lambda: time.monotonic() > left)
    assert (asked.read_text(), tries(box)) == before, "it is not tried again"
    box.model.rename(box.root / "away")
    box.write(extra_args=["--threads", "3"])
    until(lambda: len(told(box)) == 2)
    (box.root / "away").rename(box.model)
    status = box.until_config(problem=None, was=first)
    assert status.desired is not None
    assert status.desired.spec.extra_args == ("--threads", "3")


@pytest.mark.parametrize(
    ("problem", "passes"),
    [
        (Problem(code="insufficient_memory", message="", details={"limit": "l"}), True),
        (Problem(code="apply_refused", message="", details={"reason": "state_unwritable"}), True),
        (Problem(code="apply_refused", message="", details={"reason": "out_of_resources"}), True),
        (Problem(code="config_refused", message="", details={"reason": "config_insecure"}), True),
        (Problem(code="carry_failed", message=""), True),
        (Problem(code="apply_refused", message="", details={"reasons": []}), False),
        (Problem(code="config_refused", message="", details={"reason": "config_invalid"}), False),
        (Problem(code="apply_failed", message="", details={"reason": "port_in_use"}), False),
        (Problem(code="invalid_geometry", message=""), False),
    ],
)
def test_what_may_pass_is_known_by_its_cause(problem: Problem, passes: bool) -> None:
    assert (cause(problem) in PASSING) is passes
