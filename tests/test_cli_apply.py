"""`llamactl apply`: what a person reads before and after, and what a script gets."""

from __future__ import annotations

import select
import signal
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from cli_home import COMMAND, Home, fresh_home
from llamactl_builder import build as builder
from sandbox import FAKE_ENGINE, WITHIN_S, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOO_MUCH = str(2**60)


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture(scope="module")
def running() -> Iterator[Home]:
    """A home with an engine that nothing is done to."""
    with fresh_home() as home:
        home.up()
        yield home


def what_is_wanted(home: Home) -> dict[str, object]:
    status = home.run("status", "--json").result
    return {name: status[name] for name in ("desired", "override", "generation", "state")}


def file(home: Home, text: str) -> str:
    path = home.root / "engine.toml"
    path.write_text(text)
    return str(path)


def test_a_live_change_is_told_before_and_done_after(home: Home) -> None:
    home.up()
    planned = home.run("apply", "-np", "3", "--dry-run")
    assert planned.code == 0
    rows = planned.rows
    assert rows["dry run"] == "a live change on the loaded weights"
    assert rows["live"] == "n_seq: 2 -> 3"
    assert rows["slot 0"] == "5053 tokens, stays in its slot"
    assert rows["memory"].startswith("16.5 MiB needed, ")
    assert "available (" in rows["memory"]
    assert "receipt" not in planned.out
    done = home.run("apply", "-np", "3").rows
    assert done["plan"] == "a live change on the loaded weights"
    assert done["applied"] == "the geometry changed on the loaded weights"
    assert home.run("apply", "-np", "2", "--dry-run").rows["expected"] == (
        "a pause of about 80 ms, as before"
    )
    again = home.run("apply", "-np", "3")
    assert again.rows["plan"] == "nothing to do: the engine is like that already"


def test_a_relaunch_names_its_reasons_and_every_conversation(running: Home) -> None:
    port = str(free_port())
    ran = running.run("apply", "-np", "3", "--port", port, "--dry-run", "--", "--threads", "3")
    assert ran.code == 0
    assert ran.rows["dry run"] == "a relaunch: the weights are loaded again"
    lines = [line.split("  ", 1)[-1].strip() for line in ran.out.splitlines()]
    assert f"--port: {running.port} -> {port} (server)" in lines
    assert "--threads: not given -> 3 (context)" in lines
    assert ran.rows["with it"] == "n_seq: 2 -> 3"
    assert ran.rows["slot 0"] == "40 tokens, carried over by files"
    assert ran.rows["expected"].startswith("a pause of about ")


def test_a_relaunch_is_carried_out(home: Home) -> None:
    pid = home.up()["pid"]
    ran = home.run("apply", "--json", "--", "--threads", "3")
    assert ran.code == 0
    assert ran.result["plan"]["reasons"] == [
        {"field": "--threads", "kind": "context", "before": None, "after": "3"}
    ]
    assert ran.result["lifecycle"]["pid"] != pid
    closed = ", port closed "
    assert closed in home.run("ledger").out
    assert closed + "for " in home.run("restart").out
    assert ran.result["applied"]


def test_a_file_is_the_whole_engine(home: Home) -> None:
    home.up("--threads", "3")
    ran = home.run("apply", "-f", file(home, f"[engine]\nn_seq = 3\nport = {home.port}\n"))
    assert ran.code == 0
    assert ran.rows["relaunch for"] == "--threads: 3 -> not given (context)"
    desired = home.run("status", "--json").result["desired"]["spec"]
    assert (desired["n_seq"], desired["extra_args"]) == (3, [])
    assert desired["model"] == str(home.model)


@pytest.mark.parametrize(
    ("words", "code", "error", "said"),
    [
        (("-np", "3", "--live-only", "--port", "9"), 5, "apply_refused", "--port is"),
        (("--", "--no-such"), 5, "apply_refused", "--no-such"),
        (("--", "--fake-needs", TOO_MUCH), 5, "insufficient_memory", "would not fit"),
        (("-f", "{root}/nothing.toml"), 2, "config_invalid", "nothing.toml"),
        (("-f", "{root}/nothing.toml", "-np", "3"), 2, "invalid_request", "no flags beside"),
        ((), 2, "invalid_request", "nothing to apply"),
        (("--", "threads"), 2, "invalid_request", "no option of llama-server"),
        (("--", "--port", "9"), 2, "owned_argument", "--port"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    running: Home, words: tuple[str, ...], code: int, error: str, said: str
) -> None:
    before = what_is_wanted(running)
    ran = running.run("--json", "apply", *(word.format(root=running.root) for word in words))
    assert ran.code == code
    assert ran.error["code"] == error
    assert said in ran.error["message"]
    assert what_is_wanted(running) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nn_ctx = 5\n", "engine.n_ctx"),
        ("[engine]\nn_ctx = 'big'\n", "engine.n_ctx"),
        ("[daemon]\nprobe_s = 1\n", "nothing is in its [engine]"),
        ("", "nothing is in its [engine]"),
        ("[engine]\n", "nothing is in its [engine]"),
        ("[engine]\nn_seq = 3\n[demon]\nprobe_s = 1\n", "'demon' is no section"),
        ("n_ctx = 4096\n", "n_ctx"),
        ("[engine\n", "engine.toml"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(running: Home, text: str, said: str) -> None:
    ran = running.run("apply", "-f", file(running, text), "--json")
    assert ran.code == 2
    assert said in ran.error["message"]


def test_up_that_differs_points_to_apply(running: Home) -> None:
    words = running.up_words()
    ran = running.run(*words, "-np", "3")
    assert ran.code == 5
    assert "llamactl apply" in ran.err


def test_the_context_can_be_left_to_the_engine(home: Home) -> None:
    home.up()
    ran = home.run("apply", "-c", "auto")
    assert ran.rows["relaunch for"] == "n_ctx: 16384 -> auto (live)"
    assert home.run("status", "--json").result["engine"]["geometry"]["n_ctx"] == 8192
    back = home.run("apply", "-c", "16k", "--dry-run")
    assert back.rows["live"] == "n_ctx: auto -> 16384"
    assert "load: apply" in (said := home.run("ledger").out)
    assert "8k x 2" in said, "as the engine has it"


def build(home: Home, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> Path:
    """Put an engine where the builder puts them; it is what the builder has from now on."""
    path = home.paths.cache / name / "llama-server"
    home.paths.cache.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir()
    path.write_text(FAKE_ENGINE.read_text() + content)
    path.chmod(0o700)
    monkeypatch.setattr(builder, "ensure_engine", lambda **_: SimpleNamespace(path=path))
    return path


def test_an_upgrade_relaunches_with_the_newest_build(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build(home, monkeypatch, "old", "")
    assert home.run(*home.up_words(engine=old)).code == 0
    same = home.run("upgrade")
    assert (same.code, same.out) == (0, f"already the newest: {old}\n")
    new = build(home, monkeypatch, "new", "# newer\n")
    planned = home.run("upgrade", "--dry-run")
    assert planned.rows["relaunch for"].startswith("engine: fake (")
    assert home.run("status", "--json").result["desired"]["engine_path"] == str(old)
    assert home.run("upgrade", "--json").result["applied"]
    assert home.run("status", "--json").result["desired"]["engine_path"] == str(new)
    build(home, monkeypatch, "same", "# newer\n")
    again = home.run("upgrade", "--json")
    assert (again.code, again.result["applied"]) == (0, False)
    assert again.result["plan"]["action"] == "none"


def test_the_plan_is_shown_before_it_is_carried_out(home: Home) -> None:
    home.up()
    words = (*COMMAND, "apply", "--", "--fake-never-ready")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as applying:
        assert applying.stdout is not None
        assert select.select([applying.stdout], [], [], WITHIN_S)[0]
        told = [applying.stdout.readline().decode() for _ in range(2)]
        applying.send_signal(signal.SIGINT)
        applying.communicate(timeout=30)
    assert told[0].split("  ")[-1].strip() == "a relaunch: the weights are loaded again"
    assert "--fake-never-ready: not given -> " in told[1]
    home.run("stop")
    done = home.run("apply", "--", "--threads", "3")
    assert done.out.count("kept for the next start") == 1


def test_a_file_may_come_through_a_pipe_and_with_more_than_an_engine(home: Home) -> None:
    home.up()
    text = f"[engine]\nn_seq = 3\nmodel = 'model.gguf'\nport = {home.port}\n[daemon]\nprobe_s = 1\n"
    for words in (("-f", "-"), ("-f", "/dev/stdin")):
        ran = subprocess.run(
            (*COMMAND, "apply", *words, "--dry-run"),
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=home.root,
        )
        assert ran.returncode == 0, ran.stderr
        assert "n_seq: 2 -> 3" in ran.stdout
        assert "a live change" in ran.stdout, "a relative path is that of the caller"
        assert "[daemon] is left out" in ran.stderr


def test_6_an_upgrade_that_takes_too_long_goes_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build(home, monkeypatch, "old", "")
    assert home.run(*home.up_words("--fake-load-s", "3", engine=old)).code == 0
    build(home, monkeypatch, "new", "# newer\n")
    assert home.run("upgrade", "--timeout", "0.5").code == 6


def test_an_engine_of_somebody_else_is_not_upgraded(running: Home) -> None:
    ran = running.run("upgrade", "--json")
    assert ran.code == 5
    assert "was not built by llamactl" in ran.error["message"]
