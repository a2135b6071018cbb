"""A command line that was written for llama-server, as a request: with the real option table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import args, command_line
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from pathlib import Path

    from llamactl_supervisor.command_line import Foreign

CWD = "/models"


@dataclass(frozen=True)
class Reader:
    """Reads command lines as one engine would, with nothing of this machine's environment."""

    engine: Path
    home: Path

    def __call__(self, *argv: str, **env: str) -> Foreign:
        clean = {"XDG_CONFIG_HOME": str(self.home)} | env
        answer = args.ask([str(self.engine), *argv], clean)
        return command_line.read(str(self.engine), argv, answer, CWD)

    def geometry(self, *argv: str, **env: str) -> tuple[int | str, int, bool | None]:
        spec = self("-m", "m.gguf", *argv, **env).request.spec
        return spec.n_ctx, spec.n_seq, spec.kv_unified


@pytest.fixture
def read(engine_path: Path, tmp_path: Path) -> Reader:
    return Reader(engine_path, tmp_path)


def refused(read: Reader, *argv: str) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        read(*argv)
    return caught.value


def test_what_is_ours_is_taken_out_and_the_rest_stays_as_it_is_written(read: Reader) -> None:
    found = read(
        *("-t", "3", "-m", "m.gguf", "--no_mmproj_offload", "-c", "8192", "--host", "0.0.0.0"),
        *("--port", "9", "--lora-scaled", "a:0.5", "-np", "2", "--jinja", "--metrics"),
        *("--control-vector-layer-range", "1", "2", "-fa", "on"),
    )
    spec = found.request.spec
    assert spec.extra_args == (
        *("-t", "3", "--no_mmproj_offload", "--lora-scaled", "a:0.5", "--jinja"),
        *("--control-vector-layer-range", "1", "2", "-fa", "on"),
    )
    assert (spec.model, spec.n_ctx, spec.n_seq) == ("/models/m.gguf", 8192, 2)
    assert (found.host, found.port) == ("0.0.0.0", 9)
    assert (spec.host, spec.port) == ("127.0.0.1", 8080)


def test_the_geometry_is_what_the_engine_would_have_taken(read: Reader, tmp_path: Path) -> None:
    assert read.geometry() == ("auto", 4, True)
    assert read.geometry("-c", "0") == ("auto", 4, True)
    assert read.geometry("-np", "2") == ("auto", 2, False)
    assert read.geometry("-np", "2", "-kvu") == ("auto", 2, True)
    assert read.geometry("-np", "2", "-kvu", "--no-kv-unified") == ("auto", 2, False)
    assert read.geometry("-np", "-1", "--no_kv_unified") == ("auto", 4, True)
    assert read.geometry("-c", "1024", "--ctx_size", "2048", "--ctx-size", "4096")[0] == 4096
    assert read.geometry(LLAMA_ARG_CTX_SIZE="512", LLAMA_ARG_N_PARALLEL="3")[:2] == (512, 3)
    assert read.geometry("-c", "1024", LLAMA_ARG_CTX_SIZE="512")[0] == 1024
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("c = 2048\nnp = 5\nkv-unified = 1\n")
    assert read.geometry() == (2048, 5, True)
    assert read.geometry("-no-kvu", LLAMA_ARG_CTX_SIZE="512") == (512, 5, False)


def test_secrets_and_the_key_file_are_no_arguments(read: Reader, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("four\n")
    found = read(
        *("-m", "/m.gguf", "--api-key", "one,two", "--api-key", "three", "-hft", "token"),
        *("--api-key-file", str(keys), "--jinja"),
    )
    assert found.api_keys == ("one", "two", "three")
    assert found.hf_token == "token"
    assert found.request.spec.api_key_file == str(keys)
    assert found.request.spec.extra_args == ("--jinja",)
    assert "two" not in repr(found.request)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("-c", "8192"), "model_elsewhere", "no model is named"),
        (("-m", "m", "--reuse-port"), "owned_argument", "--reuse-port"),
        (("-m", "m", "-hf", "a/b"), "model_elsewhere", "--hf-repo: the model is no file"),
        (("-m", "m", "--instance-id", "x"), "owned_argument", "--instance-id"),
        (("-m", "m", "--ctx-size=4096"), "engine_spawn_failed", "--ctx-size=4096"),
        (("-m", "m", "-c", "16k"), "invalid_geometry", "16"),
        (("-m", "m", "-np", "1000"), "invalid_geometry", "1000"),
    ],
)
def test_what_cannot_be_had_is_refused(
    read: Reader, argv: tuple[str, ...], code: str, words: str
) -> None:
    problem = refused(read, *argv)
    assert problem.code == code
    assert words in problem.message


@pytest.mark.parametrize("option", ["hf-repo", "model-url", "docker-repo"])
def test_a_model_that_is_fetched_is_no_file_whoever_names_it(
    read: Reader, tmp_path: Path, option: str
) -> None:
    """llama-server would load it in place of the file that `-m` names."""
    variable = f"LLAMA_ARG_{option.upper().replace('-', '_')}"
    with pytest.raises(LlamactlError, match=variable) as by_env:
        read("-m", "m", **{variable: "a/b"})
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text(f"{option} = a/b\n")
    with pytest.raises(LlamactlError, match=str(config)) as by_file:
        read("-m", "m")
    assert by_env.value.code == by_file.value.code == "model_elsewhere"


def test_the_address_is_what_the_engine_would_have_taken(read: Reader, tmp_path: Path) -> None:
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("host = 0.0.0.0\nport = 9\nmodel = /m.gguf\n")
    found = read()
    assert (found.host, found.port, found.request.spec.model) == ("0.0.0.0", 9, "/m.gguf")
    assert read(LLAMA_ARG_PORT="10").port == 10
    assert read("--port", "11", LLAMA_ARG_PORT="10").port == 11
    assert refused(read, "-m", "m", "--port", "70000").code == "invalid_request"
