"""The command line of `llamactl run`, without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_cli.run import words
from llamactl_cli.run.words import NoAddressError, UsageError, Words

if TYPE_CHECKING:
    from pathlib import Path

SERVER = ("--", "llama-server", "-m", "x.gguf")


def test_our_options_end_where_the_command_begins() -> None:
    given = ["--linger", "2.5", "--instance=b", "--passthrough", "--", "/opt/s", "--linger", "9"]
    assert words.parse(given, {}) == Words(
        "/opt/s", ("--linger", "9"), linger_s=2.5, instance="b", passthrough=True
    )
    bare = words.parse(["llama-server", "--help"], {})
    assert bare == Words("llama-server", ("--help",))


@pytest.mark.parametrize("program", ["lama-server", "python3", ""])
def test_a_program_is_ours_or_a_path(program: str) -> None:
    with pytest.raises(UsageError, match="is neither llama-server nor a path"):
        words.parse(["--", program, "-m", "x.gguf"], {})


def test_the_environment_says_what_no_option_does() -> None:
    env = {"LLAMACTL_LINGER_S": "7", "LLAMACTL_INSTANCE": "c"}
    found = words.parse(SERVER, env)
    assert found is not None
    assert (found.linger_s, found.instance) == (7.0, "c")
    found = words.parse(["--linger", "0", *SERVER], env)
    assert found is not None
    assert found.linger_s == 0.0


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "86401", ""])
def test_a_linger_is_seconds(text: str) -> None:
    with pytest.raises(UsageError, match="--linger takes seconds"):
        words.parse(["--linger", text, *SERVER], {})


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-a", "a b", "x" * 33, "\u00e4"])
def test_an_instance_is_a_plain_name(name: str) -> None:
    with pytest.raises(UsageError, match="--instance takes a name"):
        words.parse(["--instance", name, *SERVER], {})


@pytest.mark.parametrize(
    ("args", "env", "why"),
    [
        (("-m", "x", "--version"), {}, "--version"),
        (("--list_devices",), {}, "--list-devices"),
        (("-hf", "a/b"), {}, "-hf"),
        (("-m", "x", "--models_dir", "d"), {}, "--models-dir"),
        (("-m", "x"), {"LLAMA_ARG_HF_REPO": "a/b"}, "LLAMA_ARG_HF_REPO"),
        (("-c", "8192"), {}, "no --model"),
        (("-m", "x"), {}, None),
        (("-c", "8192"), {"LLAMA_ARG_MODEL": "x"}, None),
    ],
)
def test_what_is_no_server(
    args: tuple[str, ...], env: dict[str, str], why: str | None, tmp_path: Path
) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)} | env
    found = words.no_server(args, env)
    assert found is None if why is None else found is not None and why in found


@pytest.mark.parametrize(
    ("args", "env", "where"),
    [
        (("--port", "0"), {}, ("127.0.0.1", 0)),
        ((), {}, ("127.0.0.1", 8080)),
        (("--port", "9000", "--host", "0.0.0.0"), {}, ("0.0.0.0", 9000)),
        (("--port", "9000", "--port", "9001"), {}, ("127.0.0.1", 9001)),
        ((), {"LLAMA_ARG_PORT": "9002", "LLAMA_ARG_HOST": "::1"}, ("::1", 9002)),
        (("--port", "9003"), {"LLAMA_ARG_PORT": "9002"}, ("127.0.0.1", 9003)),
    ],
)
def test_where_it_listens(
    args: tuple[str, ...], env: dict[str, str], where: tuple[str, int]
) -> None:
    assert words.address(args, env) == where


@pytest.mark.parametrize(
    "args",
    [
        ("--host", "a,b"),
        *(("--host", "/run/x.sock"), ("--host", "x.sock")),
    ],
)
def test_where_only_llama_server_itself_could_listen(args: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        words.address(args, {})


@pytest.mark.parametrize(
    "args",
    [
        *(("--port", "x"), ("--port", "65536"), ("--port", "-1"), ("--port", "9" * 5000)),
        ("--host", "a b"),
    ],
)
def test_what_is_no_place_to_listen_for_llama_server_either(args: tuple[str, ...]) -> None:
    with pytest.raises(NoAddressError):
        words.address(args, {})


@pytest.mark.parametrize("how", ["named", "usual"])
def test_with_a_file_of_llama_servers_own_it_says_itself_which_model(
    tmp_path: Path, how: str
) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)} if how == "named" else {"HOME": str(tmp_path)}
    assert words.no_server(("-c", "8192"), env) is not None
    file = tmp_path / ("." if how == "named" else ".config") / "llama.cpp" / "config.ini"
    file.parent.mkdir(parents=True)
    file.touch()
    assert words.no_server(("-c", "8192"), env) is None
    assert words.no_server(("-hf", "a/b"), env) is not None
