"""Which source gives a value, and what is said about a file that makes no sense."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamactl_supervisor import config
from llamactl_supervisor.config import Config, Flag, keys, load, load_paths
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.resolve import File, resolve

ENV = {"HOME": "/home/me"}
KEYS = {key.name: key for key in keys(Config)}
SAMPLES: dict[str, tuple[Any, str, Any]] = {
    "engine.model": ("/file.gguf", "/env.gguf", "/flag.gguf"),
    "engine.n_ctx": ("128k", "4096", 8192),
    "engine.n_seq": (3, "4", 5),
    "engine.kv_unified": (True, "false", True),
    "engine.host": ("127.0.0.2", "127.0.0.3", "127.0.0.4"),
    "engine.port": (1, "2", 3),
    "engine.extra_args": (["--a"], "--b 'c d'", ("--e",)),
    "engine.api_key_file": ("/file", "/env", "/flag"),
    "engine.engine_path": ("/file", "/env", "/flag"),
    "daemon.stop_term_s": (7, "0.5", 2.5),
    "daemon.crashes_max": (0, "1", 2),
    "paths.runtime_dir": ("/file", "/env", "/flag"),
}
"""What the file says, what the environment says, what a flag says."""
MEANT = {
    ("engine.n_ctx", "file"): 131072,
    ("engine.n_ctx", "env"): 4096,
    ("engine.n_seq", "env"): 4,
    ("engine.kv_unified", "env"): False,
    ("engine.port", "env"): 2,
    ("engine.extra_args", "file"): ("--a",),
    ("engine.extra_args", "env"): ("--b", "c d"),
    ("daemon.stop_term_s", "env"): 0.5,
    ("daemon.crashes_max", "env"): 1,
}
"""What that comes to, where it is not the same value."""

which = st.sets(st.sampled_from(sorted(SAMPLES)))


@given(which, which, which)
def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(
    in_file: set[str], in_env: set[str], in_flags: set[str]
) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for name in in_file:
        tables.setdefault(KEYS[name].section, {})[KEYS[name].field] = SAMPLES[name][0]
    env = ENV | {KEYS[name].env: SAMPLES[name][1] for name in in_env}
    flags = {name: Flag(f"--{name}", SAMPLES[name][2]) for name in in_flags}
    found, values = resolve(
        Config, file=File(Path("/etc/c.toml"), tables), env=env, flags=flags, defaults={}
    )
    assert values.keys() == KEYS.keys()
    for name, key in KEYS.items():
        value: Any = key.default
        source = "default"
        if name in in_flags:
            value, source = SAMPLES[name][2], f"flag --{name}"
        elif name in in_env:
            value, source = MEANT.get((name, "env"), SAMPLES[name][1]), f"env {key.env}"
        elif name in in_file:
            value = MEANT.get((name, "file"), SAMPLES[name][0])
            source = f"file /etc/c.toml, {name}"
        assert (values[name].value, values[name].source) == (value, source)
        assert getattr(getattr(found, key.section), key.field) == value
    said = {name for name in in_file | in_env | in_flags if KEYS[name].section == "engine"}
    assert found.engine.model_fields_set == {name.removeprefix("engine.") for name in said}


def test_every_environment_name_belongs_to_one_key() -> None:
    assert len({key.env for key in KEYS.values()}) == len(KEYS)
    assert KEYS["engine.n_ctx"].env == "LLAMACTL_ENGINE_N_CTX"
    assert KEYS["engine.engine_path"].env == "LLAMACTL_ENGINE_PATH"
    assert KEYS["daemon.stop_term_s"].env == "LLAMACTL_STOP_TERM_S"
    assert KEYS["paths.state_dir"].env == "LLAMACTL_STATE_DIR"


def test_an_empty_variable_sets_nothing() -> None:
    assert load(ENV | {"LLAMACTL_STOP_TERM_S": ""}).values["daemon.stop_term_s"].is_default


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.touch(0o600)
    return path


def wrong(file: Path, text: str | bytes, env: dict[str, str] | None = None) -> LlamactlError:
    """Return why a configuration with this file is refused."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LlamactlError) as caught:
        load(ENV | (env or {}), file=file)
    return caught.value


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[engin]\n", "'engin' is no section", "did you mean 'engine'?"),
        ("[zzz]\n", "'zzz' is no section", "known: api, daemon, engine, paths"),
        ("n_ctx = 1\n", "'n_ctx' is no key outside of a section", "belongs into [engine]"),
        ("zzz = 1\n", "'zzz' is no key outside of a section", "known: "),
        ("engine = 1\n", "engine must be a section", None),
        ("[[engine]]\n", "engine must be a section", None),
        ("[engine]\nnctx = 1\n", "'nctx' is no key in [engine]", "did you mean 'n_ctx'?"),
        ("[daemon]\nstop_s = 1\n", "'stop_s' is no key in [daemon]", "did you mean 'stop_term_s'?"),
        ("[paths]\nstate = 'x'\n", "no key in [paths]", "did you mean 'state_dir'?"),
        (
            "[engine]\nn_ctx = 0\n",
            "engine.n_ctx=0: must be a number of tokens from 256 to",
            "128k",
        ),
        ("[engine]\nn_ctx = 'big'\n", "engine.n_ctx='big': ", "engine.n_ctx takes: tokens"),
        ("[engine]\nn_ctx = '4096k k'\n", "engine.n_ctx='4096k k': ", "tokens"),
        ("[engine]\nn_ctx = 1.5\n", "engine.n_ctx=1.5: ", "tokens"),
        ("[engine]\nn_ctx = true\n", "engine.n_ctx=true: ", "tokens"),
        ("[engine]\nn_seq = '2'\n", "engine.n_seq='2': must be an integer", "integer"),
        ("[engine]\nn_seq = 257\n", "a number of slots from 1 to 256", "from 1 to 256"),
        ("[engine]\nkv_unified = 'yes'\n", "engine.kv_unified='yes': ", "true or false"),
        ("[engine]\nport = 65536\n", "less than or equal to 65535", "at most 65535"),
        ("[engine]\nhost = 'example.org'\n", "an IPv4 address", "IPv4 address"),
        ("[engine]\nmodel = ''\n", "engine.model='': must be an absolute path", "path"),
        ("[engine]\nmodel = 3\n", "engine.model=3: ", "path"),
        ('[engine]\nmodel = "/a\\u0000b"\n', "must be an absolute path", "path"),
        ("[engine]\nextra_args = '--x'\n", "engine.extra_args='--x': ", "list of strings"),
        ("[engine]\nextra_args = ['--x', 1]\n", "engine.extra_args: ", "list of strings"),
        ("[engine]\nextra_args = ['-c', '1']\n", "-c is set by the supervisor", "list"),
        ("[daemon]\nstop_term_s = 0\n", "daemon.stop_term_s=0: ", "above 0"),
        ("[daemon]\nstop_term_s = nan\n", "daemon.stop_term_s=nan: ", "above 0"),
        ("[daemon]\nstop_term_s = inf\n", "daemon.stop_term_s=inf: ", "above 0"),
        ("[daemon]\nstop_term_s = '5'\n", "daemon.stop_term_s='5': ", "number"),
        ("[daemon]\nlog_bytes_max = 1\n", "daemon.log_bytes_max=1: ", "at least 65536"),
        ("[daemon]\nlog_bytes_max = 65535\n", "daemon.log_bytes_max=65535: ", "at least 65536"),
        (
            "[daemon]\nlog_bytes_max = 1099511627777\n",
            "log_bytes_max=1099",
            "at most 1099511627776",
        ),
        ("[daemon]\nlog_files_max = 0\n", "daemon.log_files_max=0: ", "at least 1 at most 1000"),
        ("[daemon]\nlog_files_max = 1001\n", "daemon.log_files_max=1001: ", "at most 1000"),
        ("[daemon\n", "is no TOML: ", None),
        ("[daemon]\nstop_term_s = \n", "(at line 2, column 15)", None),
        ("[daemon]\nclose_s = 1\nclose_s = 2\n", "is no TOML: ", None),
        (f"x = {'1' * 5000}", "is no TOML: ", None),
        (f"x = {'[' * 5000}", "is ", None),
        (b"[daemon]\n# \xff\n", "is not UTF-8 at byte 11", None),
        (b"#" * (2**20 + 1), "no file of at most 1048576 bytes", None),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_key_value_and_what_is_allowed(
    file: Path, text: str | bytes, said: str, hint: str | None
) -> None:
    found = wrong(file, text)
    assert (found.code, found.exit_code) == ("config_invalid", 2)
    assert found.message.startswith(f"file {file}")
    assert said in found.message
    assert (hint or "") in (found.hint or "")


def test_an_argument_that_may_be_a_secret_is_not_repeated(file: Path) -> None:
    found = wrong(file, "[engine]\nextra_args = ['--api-key', 'hush']\n")
    assert "--api-key would put a secret on the command line" in found.message
    assert "hush" not in f"{found.message}{found.hint}{found.details}"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_variable_that_makes_no_sense_is_named(value: str) -> None:
    with pytest.raises(LlamactlError) as caught:
        load({"LLAMACTL_STOP_TERM_S": value})
    assert caught.value.code == "invalid_request"
    shown = {"soon": "'soon'", "nan": "nan"}.get(value) or f"{float(value)}"
    assert caught.value.message.startswith(f"LLAMACTL_STOP_TERM_S={shown}: ")


def test_a_variable_with_an_open_quote_is_refused() -> None:
    with pytest.raises(LlamactlError) as caught:
        load({"LLAMACTL_ENGINE_EXTRA_ARGS": "--a 'b"})
    assert caught.value.message.startswith("LLAMACTL_ENGINE_EXTRA_ARGS=")


def test_paths_are_meant_from_where_they_are_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[engine]\nmodel = 'm.gguf'\nengine_path = '~/bin/llama-server'\n")
    monkeypatch.chdir("/usr")
    found = load(ENV | {"LLAMACTL_ENGINE_API_KEY_FILE": "keys"}, file=file).config.engine
    assert found.model == str(file.parent / "m.gguf")
    assert found.engine_path == "/home/me/bin/llama-server"
    assert found.api_key_file == "/usr/keys"


def test_the_first_file_that_there_is_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, system, named, flagged = (tmp_path / name for name in ("llamactl", "etc", "n", "f"))
    monkeypatch.setattr(config, "SYSTEM_FILE", system)
    user.mkdir()
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load(env).file is None
    for path in (system, user / "config.toml"):
        path.touch(0o600)
        assert load(env).file == path
    env["LLAMACTL_CONFIG"] = str(named)
    with pytest.raises(LlamactlError, match=f"file {named}: cannot be read: No such file"):
        load(env)
    named.touch(0o600)
    flagged.touch(0o600)
    assert load(env).file == named
    assert load(env, file=flagged).file == flagged


def test_what_others_could_have_written_is_not_read(file: Path) -> None:
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(LlamactlError) as caught:
            load(ENV, file=file)
        assert (caught.value.code, caught.value.exit_code) == ("config_insecure", 2)
        assert caught.value.hint == f"chmod go-w {file}"
    file.chmod(0o644)
    assert load(ENV, file=file).file == file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_not_read(file: Path) -> None:
    os.chown(file, 65534, -1)
    with pytest.raises(LlamactlError, match="belongs to uid 65534"):
        load(ENV, file=file)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(LlamactlError) as caught:
            load(ENV, file=path)
        assert caught.value.code == "config_invalid"


def test_the_same_file_and_environment_are_read_again(file: Path) -> None:
    file.write_text("[engine]\nn_ctx = 4096\n")
    loaded = load(ENV | {"LLAMACTL_ENGINE_N_SEQ": "7"}, file=file)
    file.write_text("[engine]\nn_ctx = '8k'\n")
    again = loaded.again().config.engine
    assert (again.n_ctx, again.n_seq) == (8192, 7)


def test_directories_come_from_the_file_as_well(file: Path) -> None:
    file.write_text("[paths]\nstate_dir = 's'\nruntime_dir = '/run/x'\n")
    env = ENV | {"LLAMACTL_CONFIG": str(file), "LLAMACTL_RUNTIME_DIR": "/run/y"}
    for paths in (load(env).paths, load_paths(env)):
        assert (paths.state, paths.runtime) == (file.parent / "s", Path("/run/y"))


def test_whoever_looks_for_a_daemon_needs_only_the_paths_to_be_right(file: Path) -> None:
    env = ENV | {"LLAMACTL_CONFIG": str(file)}
    file.write_text("[engine]\nnonsense = 1\n[paths]\nstate_dir = '/s'\n")
    assert load_paths(env).state == Path("/s")
    file.write_text("no toml")
    with pytest.raises(LlamactlError):
        load_paths(env)
    chosen = {f"LLAMACTL_{name}_DIR": f"/{name}" for name in ("CACHE", "STATE", "RUNTIME")}
    assert load_paths(env | chosen).state == Path("/STATE")


def test_the_example_of_the_documents_is_right(file: Path) -> None:
    operations = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    example = re.search(r"```toml\n(.*?)```", operations, re.DOTALL)
    assert example is not None
    file.write_text(example[1])
    found = load(ENV, file=file)
    assert found.config.engine.model == "/home/me/models/chat.gguf"
    assert (found.config.engine.n_ctx, found.config.engine.n_seq) == (131072, 4)
    assert found.config.daemon.stop_term_s == 10


def test_values_that_do_not_go_together_are_named_with_their_sources(file: Path) -> None:
    file.write_text('[api]\nlisten = "127.0.0.1:9090"\n')
    with pytest.raises(LlamactlError) as caught:
        load({}, file=file)
    assert caught.value.code == "config_invalid"
    assert "[api]: to listen on 127.0.0.1:9090 needs a token_file" in caught.value.message
    assert caught.value.hint == f"given: api.listen by file {file}, api.listen"
