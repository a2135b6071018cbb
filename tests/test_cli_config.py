"""`config`, `reload`, and what `up` and `serve` take from a configuration."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from cli_home import COMMAND, FAKE_ENGINE, Home, fresh_home
from llamactl_supervisor.config import Config, keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with fresh_home() as home, monkeypatch.context() as named:
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
        "meaning": "Context in tokens, in total over all slots. Changes live.",
    }
    assert shown["values"]["engine.n_seq"]["source"] == "env LLAMACTL_ENGINE_N_SEQ"
    assert shown["values"]["engine.host"]["source"] == "default"
    assert shown["values"]["paths.state_dir"]["value"] == str(home.paths.state)
    assert all(value["meaning"] for value in shown["values"].values())
    changed = home.run("config", "show", "--changed", "--json").result["values"]
    assert {key for key in changed if key.startswith("engine.")} == {
        "engine.model", "engine.engine_path", "engine.port", "engine.n_ctx", "engine.n_seq",
    }  # fmt: skip
    narrow = home.run("config", "show").out.splitlines()
    assert narrow[0].split() == ["KEY", "VALUE", "SOURCE"]
    assert narrow[2].split() == ["engine.n_seq", "3", "env"]
    assert narrow.pop() == f"file: {file}"
    assert max(map(len, narrow)) <= 80
    text = home.run("config", "show", "--changed", "--wide").out
    assert "engine.host" not in text
    assert text.splitlines()[0].split() == ["KEY", "VALUE", "SOURCE", "MEANING"]


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


def test_a_mistyped_variable_is_named_with_the_nearest(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slip:
        slip.setenv("LLAMACTL_ENGINE_NCTX", "8k")
        slip.setenv("LLAMACTL_ENGINE_LOG", "/what/env/exports")
        slip.setenv("LLAMACTL_ENGINE_PROT", "")
        ran = home.run("config", "check", "--json")
        assert (ran.code, ran.error["code"]) == (2, "invalid_request")
        assert ran.error["details"]["mistyped"] == {"LLAMACTL_ENGINE_NCTX": "LLAMACTL_ENGINE_N_CTX"}
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
    rows = home.run("config", "docs").out.splitlines()[2:]
    assert len(rows) == len(list(keys(Config)))
    assert all(row.count(" | ") == 4 and not row.endswith("|  |") for row in rows)
    assert any(
        row.startswith("| `daemon.stop_term_s` | number above 0 | `5.0` | `LLAMACTL_STOP_TERM_S` |")
        for row in rows
    )
    documented = home.run("config", "docs", "--json").result
    assert documented["engine.n_ctx"]["environment"] == "LLAMACTL_ENGINE_N_CTX"


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
    words = [*COMMAND, "serve", "--config", str(write(home)), "--log-format", "json"]
    env = {name: value for name, value in os.environ.items() if name != "LLAMACTL_CONFIG"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as serving:
        try:
            home.await_daemon()
            assert home.run("wait", "--ready").code == 0
            assert home.run("down").code == 0
        finally:
            serving.kill()
        _, err = serving.communicate()
    assert all(json.loads(line)["at"] for line in err.splitlines())
    assert "state=ready" in err
