"""A restart that cannot succeed leaves the engine alone; a start that cannot is tried once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
from llamactl_supervisor import preflight
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineRequest, EngineState, Operation, UpRequest
from sandbox import FAKE_ENGINE, WITHIN_S, Sandbox

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
        ("model.gguf", "engine_spawn_failed", "model.gguf cannot be read: No such file"),
        ("keys", "invalid_request", "keys cannot be read: No such file"),
        ("engine", "engine_spawn_failed", "engine could not be run: No such file"),
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
