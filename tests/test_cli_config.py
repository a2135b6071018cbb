"""`config`, `reload`, and what `up` and `serve` take from a configuration."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_home import Home, fresh_home, serving
from llamactl_supervisor.config import Config, keys
from sandbox import FAKE_ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home, pytest.MonkeyPatch.context() as named:
        named.setenv("LLAMACTL_CONFIG", str(home.root / "config.toml"))
        write(home)
        yield home
        write(home)  # `down` must find the daemon


def write(home: Home, *lines: str) -> Path:
    """Write a file that names the fake engine; `lines` go into [engine]."""
    file = home.root / "config.toml"
    file.touch(0o600)
    named = ("model = 'model.gguf'", f"engine_path = '{FAKE_ENGINE}'", f"port = {home.port}")
    file.write_text("\n".join(["[engine]", *named, *lines, ""]))
    return file


def test_show_tells_every_value_its_source_and_its_meaning(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(home, "n_ctx = '64k'")
    monkeypatch.setenv("LLAMACTL_ENGINE_N_SEQ", "3")
    shown = home.run("config", "show", "--json").result
    assert shown["file"] == str(file)
    assert shown["values"].keys() == {key.name for key in keys(Config)}
    assert shown["values"]["engine.n_ctx"] == {
        "value": 65536,
        "source": f"file {file}, engine.n_ctx",
        "meaning": "Context in tokens, in total over all slots; `auto`: as the engine does. "
        "Changes live.",
    }
    assert shown["values"]["engine.n_seq"]["source"] == "env LLAMACTL_ENGINE_N_SEQ"
    assert shown["values"]["engine.host"]["source"] == "default"
    assert shown["values"]["paths.state_dir"]["value"] == str(home.paths.state)
    assert all(value["meaning"] for value in shown["values"].values())
    changed = home.run("config", "show", "--changed", "--json").result["values"]
    assert {key for key in changed if key.startswith("engine.")} == {
        "engine.model", "engine.engine_path", "engine.port", "engine.n_ctx", "engine.n_seq",
    }  # fmt: skip
    assert shown["daemon"] is None
    narrow = home.run("config", "show").out.splitlines()
    assert narrow.pop() == "no daemon answers: a new one would go by these"
    assert narrow[0].split() == ["KEY", "VALUE", "SOURCE"]
    assert narrow[2].split() == ["engine.n_seq", "3", "env"]
    assert narrow.pop() == f"file: {file}"
    assert max(map(len, narrow)) <= 80
    text = home.run("config", "show", "--changed", "--wide").out
    assert "engine.host" not in text
    assert text.splitlines()[0].split() == ["KEY", "VALUE", "SOURCE", "MEANING"]


def test_show_tells_what_the_daemon_that_runs_goes_by(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reason once: not read yet, not in force yet, asked for otherwise, not for files."""
    file = write(home, "n_seq = 2")
    pid = home.run("up", "--kv-unified", "--json").result["daemon_pid"]
    said = home.run("config", "show", "--changed").out
    assert f"the daemon (pid {pid}) goes by these instead:" in said
    assert said.splitlines()[-1].split("  ")[0] == "engine.kv_unified"
    assert home.run("reconfigure", "-np", "4").code == 0
    write(home, "n_seq = 2", "n_ctx = '64k'", "extra_args = ['--fake-busy']")
    with file.open("a") as more:
        more.write("[daemon]\nprobe_s = 7\nclose_s = 3\nstop_term_s = 9\n")
    monkeypatch.setenv("LLAMACTL_SETTLE_S", "11")
    shown = home.run("config", "show", "--json").result
    assert shown["values"]["engine.n_ctx"]["value"] == 65536
    assert shown["daemon"] == {
        "pid": pid,
        "file": str(file),
        "differs": {
            "engine.n_ctx": {"running": 16384, "why": "until `llamactl reload`"},
            "engine.n_seq": {"running": 4, "why": "asked for by `up` or `reconfigure`"},
            "engine.kv_unified": {"running": True, "why": "asked for by `up` or `reconfigure`"},
            "engine.extra_args": {
                "running": [],
                "why": "until `llamactl reload`, then `restart`",
            },
            "daemon.probe_s": {"running": 2.0, "why": "until `llamactl reload`"},
            "daemon.settle_s": {"running": 180.0, "why": "set in this shell alone"},
            "daemon.close_s": {"running": 2.0, "why": "until the daemon is restarted"},
        },
    }
    lines = home.run("config", "show").out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("file: ")) <= 80
    monkeypatch.setenv("LLAMACTL_STOP_TERM_S", "4")
    assert home.run("reload").code == 0
    differs = home.run("config", "show", "--json").result["daemon"]["differs"]
    assert {key: other["why"] for key, other in differs.items()} == {
        "engine.n_seq": "asked for by `up` or `reconfigure`",
        "engine.kv_unified": "asked for by `up` or `reconfigure`",
        "engine.extra_args": "until `llamactl restart`",
        "daemon.settle_s": "set in this shell alone",
        "daemon.stop_term_s": "by the daemon's own variable",
        "daemon.close_s": "until the daemon is restarted",
    }
    assert home.run("restart").code == 0
    assert (
        "engine.extra_args" not in home.run("config", "show", "--json").result["daemon"]["differs"]
    )


def test_check_is_0_or_2(home: Home) -> None:
    file = write(home)
    first, *rest = home.run("config", "check").out.splitlines()
    assert first == f"{file}: ok"
    assert "environment: LLAMACTL_STOP_TERM_S sets daemon.stop_term_s" in rest
    other = home.root / "other.toml"
    other.touch(0o600)
    checked = home.run("config", "check", str(other), "--json").result
    assert (checked["file"], checked["ok"]) == (str(other), True)
    assert checked["environment"]["LLAMACTL_STATE_DIR"] == "paths.state_dir"
    other.write_text("[engine]\nnctx = 1\n")
    ran = home.run("config", "check", str(other))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f"llamactl: file {other}: 'nctx' is no key in [engine]\n  did you mean 'n_ctx'?\n"
    )
    other.write_text("[engine\n")
    assert "at line 1, column 8" in home.run("config", "check", str(other)).err
    assert home.run("config", "check", str(home.root / "absent.toml")).code == 2


TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("section", "lines", "said"),
    [
        ("api", ["listen = '127.0.0.1:9401'", "token_file = '{0}/absent'"], "cannot be read"),
        ("api", ["listen = '127.0.0.1:9401'", "token_file = '{0}/weak'"], "can be guessed"),
        ("api", ["listen = '127.0.0.1:9401'", "token_file = '{0}/open'"], "open to others"),
        (
            "api",
            [
                *("listen = '127.0.0.1:9401'", "token_file = '{0}/good'"),
                "probes_listen = '0.0.0.0:9401'",
            ],
            "api.listen (127.0.0.1:9401) and api.probes_listen (0.0.0.0:9401) are one port",
        ),
        ("api", ["probes_listen = '192.0.2.1:9401'"], "192.0.2.1 cannot be listened on"),
        ("engine", ["api_key_file = '{0}/absent'"], "the API key file"),
        ("engine", ["model = '{0}/absent'", "engine_path = '{0}/good'"], "is no program"),
        ("engine", ["model = '{0}/good'"], "is no GGUF file"),
        ("engine", ["model = '{0}/model.gguf'"], "no llama-server is known"),
    ],
)
def test_check_tells_what_this_machine_has_not(
    home: Home, section: str, lines: list[str], said: str
) -> None:
    for name, text, mode in (
        *(("weak", "short", 0o600), ("open", TOKEN, 0o644), ("good", TOKEN, 0o600)),
    ):
        (home.root / name).write_text(text)
        (home.root / name).chmod(mode)
    file = home.root / "other.toml"
    file.touch(0o600)
    file.write_text("\n".join([f"[{section}]", *lines, ""]).replace("{0}", str(home.root)))
    ran = home.run("config", "check", str(file))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("llamactl: it makes sense, but not on this machine: ")
    assert said in ran.err
    assert home.run("config", "check", str(file), "--syntax").code == 0
    (home.root / "config.toml").write_text(file.read_text())
    found = json.loads(home.run("doctor", "--json").out)["findings"]
    assert any(
        said in each["found"] and each["level"] == "fail" and each["check"] == "configured"
        for each in found
    )


def test_a_mistyped_variable_is_named_with_the_nearest(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slip:
        slip.setenv("LLAMACTL_ENGINE_NCTX", "8k")
        slip.setenv("LLAMACTL_ENGINE_LOG", "/what/env/exports")
        slip.setenv("LLAMACTL_ENGINE_PROT", "")
        slip.setenv("LLAMACTL_FOO", "bar")
        ran = home.run("config", "check", "--json")
        assert (ran.code, ran.error["code"]) == (2, "invalid_request")
        assert ran.error["details"]["mistyped"] == {
            "LLAMACTL_ENGINE_NCTX": "LLAMACTL_ENGINE_N_CTX",
            "LLAMACTL_FOO": None,
        }
        said = "LLAMACTL_ENGINE_NCTX sets nothing: did you mean LLAMACTL_ENGINE_N_CTX?"
        assert said in ran.error["message"]
        found = home.run("doctor", "--json")
        findings = json.loads(found.out)["findings"]
        assert (said, "warn") in [(each["found"], each["level"]) for each in findings]
        write(home)
        home.run("up")
        assert f"warning llamactl environment: {said}" in home.paths.daemon_log.read_text()
    assert home.run("status").code == 0


def test_docs_has_a_row_for_every_key(home: Home) -> None:
    lines = home.run("config", "docs").out.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(list(keys(Config)))
    assert all(row.count(" | ") == 5 and not row.endswith("|  |") for row in rows)
    for start in (
        "| `engine.n_seq` | integer from 1 to 256 | `2` | `LLAMACTL_ENGINE_N_SEQ` | live |",
        "| `engine.extra_args` | list of strings | `[]` | `LLAMACTL_ENGINE_EXTRA_ARGS` | engine |",
        "| `daemon.stop_term_s` | number above 0 | `5.0` | `LLAMACTL_STOP_TERM_S` | live |",
        "| `daemon.close_s` | number above 0 | `2.0` | `LLAMACTL_CLOSE_S` | daemon |",
    ):
        assert any(row.startswith(start) for row in rows), start
    documented = home.run("config", "docs", "--json").result
    assert documented["engine.n_ctx"]["environment"] == "LLAMACTL_ENGINE_N_CTX"
    assert documented["api.listen"]["takes"] == "daemon_restart"


def test_up_takes_what_no_flag_says_from_the_configuration(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "n_ctx = '8k'", "n_seq = 4", "kv_unified = true")
    monkeypatch.setenv("LLAMACTL_ENGINE_N_SEQ", "3")
    up = home.run("up", "--per-slot", "1k", "--no-kv-unified", "--json").result
    assert (up["model"], up["url"]) == (str(home.model), f"http://127.0.0.1:{home.port}")
    spec = home.run("status", "--json").result["desired"]["spec"]
    assert (spec["n_ctx"], spec["n_seq"], spec["kv_unified"]) == (3072, 3, False)


def test_up_proves_what_is_configured_and_names_where(home: Home) -> None:
    file = write(home, "api_key_file = 'absent'")
    ran = home.run("up")
    assert (ran.code, ran.out) == (2, "")
    assert f"file {file}, engine.api_key_file" in ran.err
    file.write_text("[engine]\nn_seq = 0\n")
    assert home.run("up", "--json").error["code"] == "config_invalid"
    assert not home.paths.runtime.exists()


def test_a_relative_name_of_the_file_is_the_same_for_the_daemon(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(home)
    with monkeypatch.context() as here:
        here.chdir(home.root)
        here.setenv("LLAMACTL_CONFIG", "config.toml")
        home.run("up")
        write(home, "n_seq = 5")
        reloaded = home.run("reload", "--json").result
    assert [change["field"] for change in reloaded["applied"]] == ["engine.n_seq"]
    assert f"reload of {file} by" in home.paths.daemon_log.read_text()


def test_reload_says_what_came_of_each_field(home: Home) -> None:
    home.run("up")
    assert home.run("reload").out == "reloaded  nothing in the configuration has changed\n"
    write(home, "n_ctx = '64k'", "extra_args = ['--fake-busy']")
    ran = home.run("reload")
    assert ran.code == 0
    assert ran.rows["in force"] == "engine.n_ctx: 16384 -> 65536"
    assert 'engine.extra_args: [] -> ["--fake-busy"]' in ran.out
    assert ran.rows["after"] == "65536 tokens: 2 slots of 32768"
    assert "engine.extra_args is [], not" in home.run("status").out
    again = home.run("reload", "--json").result
    assert (again["unchanged"], len(again["needs_restart"])) == (True, 1)


def test_reload_names_what_the_file_says_in_vain(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as pinned:
        pinned.setenv("LLAMACTL_ENGINE_N_SEQ", "3")
        home.run("up")
    write(home, "n_seq = 4")
    ran = home.run("reload")
    assert "nothing in the configuration has changed" in ran.out
    why = "engine.n_seq: the daemon has it by its own env LLAMACTL_ENGINE_N_SEQ"
    assert ran.rows["overruled"].startswith(why)


def test_reload_without_an_engine_and_without_a_daemon(home: Home) -> None:
    assert home.run("reload").code == 4
    home.run("up")
    home.run("stop")
    write(home, "n_seq = 5")
    assert home.run("reload").rows["in force"] == "engine.n_seq: 2 -> 5"


def test_a_declined_reload_is_5_with_the_reason(home: Home) -> None:
    write(home, "extra_args = ['--fake-refuse', 'insufficient_memory']")
    home.run("up")
    write(home, "extra_args = ['--fake-refuse', 'insufficient_memory']", "n_ctx = '64k'")
    ran = home.run("reload", "--json")
    assert (ran.code, ran.error["code"]) == (5, "insufficient_memory")
    assert home.run("reload").code == 0, "the file still differs: it is tried again"


def test_a_broken_file_is_5_with_the_reason_also_where_it_hides_the_daemon(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.run("up")
    file = write(home, "n_seqs = 3")
    ran = home.run("reload", "--json")
    assert (ran.code, ran.error["code"]) == (5, "config_refused")
    assert ran.error["message"] == f"file {file}: 'n_seqs' is no key in [engine]"
    assert ran.error["hint"] == "did you mean 'n_seq'?"
    assert home.run("status").code == 0, "the daemon is found all the same"
    file.write_text("no toml")
    with monkeypatch.context() as hidden:
        hidden.delenv("LLAMACTL_CACHE_DIR")
        ran = home.run("reload", "--json")
    assert (ran.code, ran.error["code"]) == (5, "config_refused")


def test_serve_takes_a_file_and_writes_json(home: Home) -> None:
    words = ("--config", str(write(home)), "--log-format", "json")
    env = {name: value for name, value in os.environ.items() if name != "LLAMACTL_CONFIG"}
    with serving(*words, env=env) as daemon:
        home.await_daemon()
        assert home.run("wait", "--ready").code == 0
        assert home.run("down").code == 0
        _, err = daemon.communicate()
    assert all(json.loads(line)["at"] for line in err.splitlines())
    assert "state=ready" in err


def test_a_first_serve_has_the_engine_that_was_built(
    home: Home, engine_path: Path, model_path: Path
) -> None:
    file = home.root / "config.toml"
    file.write_text(f"[engine]\nmodel = '{model_path}'\n")
    env = {name: value for name, value in os.environ.items() if name != "LLAMACTL_ENGINE_PATH"}
    env["LLAMACTL_CACHE_DIR"] = str(engine_path.parents[2])
    env["LLAMACTL_ENGINE_PORT"] = str(home.port)
    with serving(env=env):
        home.await_daemon()
        assert home.run("wait", "--ready").code == 0
        engine = home.run("status", "--json").result["engine"]
        assert psutil.Process(engine["pid"]).exe() == str(engine_path)
        shown = home.run("config", "show", "--json").result
        assert shown["values"]["engine.engine_path"]["value"] is None, "nobody has configured it"
        file.write_text(f"[engine]\nmodel = '{model_path}'\nengine_path = '{FAKE_ENGINE}'\n")
        (change,) = home.run("reload", "--json").result["needs_restart"]
        assert (change["field"], change["after"]) == ("engine.engine_path", str(FAKE_ENGINE))
        assert home.run("down").code == 0
