"""A restart that cannot succeed leaves the engine alone; a start that cannot is tried once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import preflight
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineRequest, EngineState, LoadLine, Operation, UpRequest
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(stop_term_s=1, crashes_max=4)
    yield sandbox
    sandbox.close()


def asked(box: Sandbox, call: Callable[[], Operation]) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        box.client.wait_operation(call(), timeout_s=WITHIN_S)
    return caught.value


def with_keys(box: Sandbox) -> UpRequest:
    keys = box.root / "keys"
    keys.write_text("one\n")
    request = box.request()
    spec = request.spec.model_copy(update={"api_key_file": str(keys)})
    return request.model_copy(update={"spec": spec})


@pytest.mark.parametrize(
    ("broken", "reason", "words"),
    [
        ("model.gguf", "file_unreadable", "model.gguf cannot be read: No such file"),
        ("keys", "file_unreadable", "keys cannot be read: No such file"),
        ("engine", "file_unreadable", "engine cannot be read: No such file"),
    ],
)
def test_a_restart_that_would_bring_no_engine_is_refused(
    box: Sandbox, broken: str, reason: str, words: str
) -> None:
    box.start()
    engine = box.root / "engine"
    engine.symlink_to(FAKE_ENGINE)
    request = with_keys(box).model_copy(update={"engine_path": str(engine)})
    box.client.wait_operation(box.client.up(request), timeout_s=WITHIN_S)
    pid = box.engine_pid()
    kept = (box.root / broken).rename(box.root / "aside")
    problem = asked(box, box.client.restart)
    assert (problem.code, problem.exit_code) == ("restart_refused", 5)
    assert 'llamactl_operations_total{kind="restart",outcome="refused"} 1.0' in box.metrics()
    assert problem.details["reason"] == reason
    assert words in problem.message
    status = box.client.status()
    assert (status.state, status.crashes, box.engine_pid()) == (EngineState.READY, 0, pid)
    assert status.operation is None
    kept.rename(box.root / broken)
    box.client.wait_operation(box.client.restart(), timeout_s=WITHIN_S)
    assert box.engine_pid() != pid


def test_an_option_that_the_engine_does_not_know_fails_the_start_with_its_words(
    box: Sandbox,
) -> None:
    box.start()
    problem = asked(box, lambda: box.client.up(box.request("--no-such-option")))
    assert (problem.code, problem.exit_code) == ("engine_spawn_failed", 1)
    assert "--no-such-option" in problem.details["last_lines"][-1]
    assert box.client.status().state is EngineState.FAILED


def test_an_engine_that_crashes_and_cannot_be_started_again_is_not_tried_again(
    box: Sandbox,
) -> None:
    box.start()
    box.up()
    box.model.write_bytes(b"GGML")
    psutil.Process(box.engine_pid()).kill()
    box.until_state(EngineState.FAILED)
    status = box.client.status()
    assert status.problem is not None
    assert status.problem.message.endswith("model.gguf is no GGUF file")
    assert status.crashes == 2, "the crash, and the one start that was tried"


def configured(box: Sandbox) -> None:
    """Have every daemon bring the fake engine up by itself."""
    box.env |= {
        "LLAMACTL_ENGINE_MODEL": str(box.model),
        "LLAMACTL_ENGINE_PATH": str(FAKE_ENGINE),
        "LLAMACTL_ENGINE_PORT": str(box.port),
    }


def test_a_model_that_is_mounted_late_is_waited_for(box: Sandbox) -> None:
    configured(box)
    box.env["LLAMACTL_BACKOFF_BASE_S"] = "2"
    aside = box.model.rename(box.root / "aside")
    box.start()
    box.until_state(EngineState.CRASHED)
    problem = box.client.status().problem
    assert problem is not None
    assert problem.code == "file_unreadable"
    assert problem.message == (
        f"the model {box.model} cannot be read: No such file or directory; waited for"
    )
    aside.rename(box.model)
    box.until_state(EngineState.READY)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_model_that_comes_back_after_all_tries_is_noticed(
    box: Sandbox, *, restarted: bool
) -> None:
    """By the daemon that gave up, and by one that is new."""
    configured(box)
    box.env["LLAMACTL_BACKOFF_CAP_S"] = "600" if restarted else "0.3"
    aside = box.model.rename(box.root / "aside")
    box.start()
    box.until_state(EngineState.FAILED)
    status = box.client.status()
    assert status.problem is not None
    assert status.crashes == 5
    assert "llamactl_engine_crashes_total 0.0" in box.metrics(), "no engine has ended"
    assert status.crash_record is None
    assert status.problem.message.endswith("; looked for; `llamactl start` tries at once")
    if restarted:
        box.kill_daemon()
    aside.rename(box.model)
    if restarted:
        box.start()
    box.until_state(EngineState.READY)
    assert box.client.status().crashes == 0, "it serves: no failure is in a row any more"
    until(lambda: box.client.ledger().totals.weight_loads)
    lines = box.client.ledger().lines
    causes = {line.cause for line in lines if isinstance(line, LoadLine)}
    assert causes == {"config"}, "no engine has crashed"


def test_a_load_that_a_person_asks_for_says_at_once_what_is_missing(box: Sandbox) -> None:
    """And is made when it is there."""
    box.env["LLAMACTL_BACKOFF_CAP_S"] = "0.3"
    box.start()
    aside = box.model.rename(box.root / "aside")
    problem = asked(box, lambda: box.client.up(box.request()))
    assert (problem.code, problem.exit_code) == ("file_unreadable", 1)
    assert box.client.status().crashes == 1
    aside.rename(box.model)
    box.until_state(EngineState.READY)
    box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)


def test_the_real_engine_judges_its_command_line(
    engine_path: Path, tmp_path: Path, box: Sandbox
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    box.paths.create()

    def check(*extra: str) -> None:
        spec = EngineRequest(model=str(model), extra_args=extra)
        request = UpRequest(spec=spec, engine_path=str(engine_path))
        preflight.check(request, None, box.paths, {"HOME": str(tmp_path)})

    check("--threads", "3")
    with pytest.raises(LlamactlError, match="invalid argument: --thraeds"):
        check("--thraeds", "3")


def test_an_engine_that_cannot_judge_is_not_asked_to(box: Sandbox) -> None:
    engine = box.root / "upstream"
    engine.write_text("#!/bin/sh\necho 'error: invalid argument: --print-args-json' >&2\nexit 1\n")
    engine.chmod(0o700)
    box.paths.create()
    request = box.request().model_copy(update={"engine_path": str(engine)})
    preflight.check(request, None, box.paths, {})
