"""The engine's command line and the holder's order."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from llamactl_supervisor.config import Paths, Settings
from llamactl_supervisor.fields import OWNED_ENV
from llamactl_supervisor.launch import engine_argv, holder_order, instance_id, pages_dir
from llamactl_supervisor.models import EngineRequest, Override, UpRequest

PATHS = Paths(Path("/c"), Path("/s"), Path("/r"))
SPEC = EngineRequest(model="/m.gguf", n_ctx=16384, n_seq=2, port=9, extra_args=("--jinja",))
REQUEST = UpRequest(spec=SPEC, engine_path="/bin/llama-server")


def test_the_whole_command_line() -> None:
    assert " ".join(engine_argv(REQUEST, None, "id", PATHS)) == (
        "/bin/llama-server --model /m.gguf --host 127.0.0.1,/r/engine-id/engine.sock --port 9 "
        "--ctx-size 16384 --parallel 2 --instance-id id --admin-private "
        "--metrics --slot-save-path /s/pages/ --jinja"
    )


def test_a_live_geometry_holds_over_a_relaunch() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    override = Override(n_ctx=131072, n_seq=4, kv_unified=True, by="me", at=at)
    argv = " ".join(engine_argv(REQUEST, override, "id", PATHS))
    assert "--ctx-size 131072 --parallel 4 --kv-unified" in argv


@pytest.mark.parametrize("option", ["--slot-save-path", "--slot_save_path"])
def test_a_directory_for_pages_that_the_user_chose_is_the_only_one(option: str) -> None:
    spec = EngineRequest.parse({"model": "/m.gguf", "extra_args": ["--jinja", option, "/mine"]})
    request = REQUEST.model_copy(update={"spec": spec})
    argv = engine_argv(request, None, "id", PATHS)
    assert argv[-3:] == ["--jinja", option, "/mine"]
    assert "/s/pages/" not in argv
    assert (pages_dir(request, PATHS), pages_dir(REQUEST, PATHS)) == (Path("/mine"), PATHS.pages)


def test_an_engine_begins_quiet_where_it_is_to_wait() -> None:
    assert "--quiesced" not in engine_argv(REQUEST, None, "id", PATHS)
    assert "--quiesced" in engine_argv(REQUEST, None, "id", PATHS, quiet=True)


def test_keys_travel_as_a_path() -> None:
    spec = SPEC.model_copy(update={"api_key_file": "/keys"})
    request = REQUEST.model_copy(update={"spec": spec})
    argv = engine_argv(request, None, "id", PATHS, Path("/r/engine-id/api-keys"))
    assert argv[argv.index("--api-key-file") + 1] == "/r/engine-id/api-keys"
    assert "/keys" not in argv


def test_no_environment_can_set_what_is_ours() -> None:
    env = dict.fromkeys(OWNED_ENV, "1") | {"CUDA_VISIBLE_DEVICES": "0"}
    order = holder_order(["/e"], env, "id", PATHS, Settings())
    assert order["env"] == {"CUDA_VISIBLE_DEVICES": "0", "GGML_NO_BACKTRACE": "1"}


def test_instances_are_told_apart() -> None:
    names = {instance_id(UUID(int=seed), number) for seed in range(3) for number in range(3)}
    assert len(names) == 9
    assert {len(name) for name in names} == {32}
