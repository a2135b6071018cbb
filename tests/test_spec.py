"""What the real engine is asked to be, whoever says it and in whatever spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import preflight
from llamactl_supervisor.errors import FailedError, LlamactlError
from llamactl_supervisor.models import EngineRequest, UpRequest
from llamactl_supervisor.plan import NoChange, Reconfigure, Relaunch, plan
from llamactl_supervisor.spec import LOADED, EngineSpec
from sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    sandbox.paths.create()
    yield sandbox
    sandbox.close()


@pytest.fixture
def asked(engine_path: Path, box: Sandbox) -> Callable[..., EngineSpec]:
    def ask(*extra: str, env: dict[str, str] | None = None, **fields: object) -> EngineSpec:
        spec = EngineRequest.parse({"model": str(box.model), "extra_args": extra} | fields)
        request = UpRequest(spec=spec, engine_path=str(engine_path))
        clean = {"XDG_CONFIG_HOME": str(box.root)} | (env or {})
        return preflight.asked(request, None, box.paths, clean)

    return ask


def forced_by(verdict: object) -> list[str]:
    assert isinstance(verdict, Relaunch)
    return [each.field for each in verdict.reasons]


def test_spelling_order_and_source_are_no_difference(asked: Callable[..., EngineSpec]) -> None:
    long = asked("--threads", "3", "--no-kv-offload", "--flash-attn", "on")
    assert plan(long, asked("-fa", "on", "-nkvo", "-t", "3")) == NoChange()
    assert (
        plan(long, asked("--flash_attn", "on", "--no_kv_offload", "--threads", "3")) == NoChange()
    )
    by_env = asked("-nkvo", "-fa", "on", env={"LLAMA_ARG_THREADS": "3"})
    assert plan(long, by_env) == NoChange()


def test_a_file_of_the_engine_counts(asked: Callable[..., EngineSpec], box: Sandbox) -> None:
    plain = asked()
    config = box.root / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("t = 5\n")
    assert forced_by(plan(plain, asked())) == ["--threads"]


@pytest.mark.parametrize("option", sorted(LOADED))
@pytest.mark.parametrize("value", ["gone:1", "there:1,gone:0.5"])
def test_a_file_that_is_missing_is_named_before_any_engine_ends_for_it(
    asked: Callable[..., EngineSpec], box: Sandbox, option: str, value: str
) -> None:
    there, gone = box.root / "there", box.root / "gone"
    there.write_bytes(b"GGUF")
    names = value.replace("there", str(there)).replace("gone", str(gone))
    with pytest.raises(FailedError, match=f"the file of {option} {gone} cannot be read"):
        asked(option, names)


def test_a_secret_is_a_hash(asked: Callable[..., EngineSpec]) -> None:
    one, two = (asked(env={"LLAMA_API_KEY": key}) for key in ("s3cret", "0ther"))
    assert forced_by(plan(one, two)) == ["--api-key"]
    assert "s3cret" not in one.model_dump_json()


def test_requested_is_compared_and_not_what_it_is_rounded_to(
    asked: Callable[..., EngineSpec],
) -> None:
    assert plan(asked(n_ctx=10000, n_seq=3), asked(n_ctx=10000, n_seq=3)) == NoChange()
    assert isinstance(plan(asked(n_ctx=10000, n_seq=3), asked(n_ctx=10752, n_seq=3)), Reconfigure)


def test_auto_is_passed_as_nothing(asked: Callable[..., EngineSpec]) -> None:
    auto = asked(n_ctx="auto", n_seq=2)
    assert (auto.n_ctx, auto.n_seq, auto.kv_unified) == ("auto", 2, False)
    assert isinstance(plan(auto, asked(n_ctx=4096, n_seq=2)), Reconfigure)


def test_what_the_files_hold_counts_and_not_their_names(
    asked: Callable[..., EngineSpec], box: Sandbox
) -> None:
    template, log = box.root / "t.jinja", box.root / "log"
    template.write_text("one")
    log.write_text("line")
    flags = ("--chat-template-file", str(template), "--log-file", str(log))
    before = asked(*flags)
    log.write_text("another line")
    assert plan(before, asked(*flags)) == NoChange()
    template.write_text("two")
    assert forced_by(plan(before, asked(*flags))) == ["--chat-template-file"]
    box.model.write_bytes(b"GGUF, another")
    assert "--model" in forced_by(plan(before, asked(*flags)))


def test_it_is_read_again_as_it_was_written(asked: Callable[..., EngineSpec]) -> None:
    spec = asked("-t", "3", "--control-vector-layer-range", "1", "2")
    assert EngineSpec.model_validate_json(spec.model_dump_json()) == spec


def test_an_option_that_is_none_is_refused(asked: Callable[..., EngineSpec]) -> None:
    with pytest.raises(LlamactlError, match="invalid argument: --thraeds"):
        asked("--thraeds", "3")
