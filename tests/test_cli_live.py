"""Commands about an engine that runs: the fake engine under a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from cli_home import COMMAND, Home, fresh_home, serving
from llamactl_cli import versions
from llamactl_supervisor.client import Client
from llamactl_supervisor.models import PageReceipt

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture(scope="module")
def running() -> Iterator[Home]:
    """A home with an engine that nothing is done to; it has written more than a pipe holds."""
    with fresh_home() as home:
        home.up("--fake-flood", "1000000")
        yield home


@pytest.fixture(scope="module")
def paged() -> Iterator[Home]:
    """A home with an engine that declines every page verb it is asked for."""
    with fresh_home() as home:
        home.up("--fake-parked")
        yield home


def test_a_reconfigure_prints_the_receipt_as_a_person_reads_it(home: Home) -> None:
    home.up()
    ran = home.run("reconfigure", "--n-ctx", "131072", "--n-seq", "4")
    assert ran.code == 0
    rows = ran.rows
    assert next(iter(rows)) == "applied"
    assert rows["before"] == "16384 tokens: 2 slots of 8192"
    assert rows["after"] == "131072 tokens: 4 slots of 32768"
    assert rows["usable"] == "8192 of the 32768 in a slot (training context or a cap)"
    assert rows["pause"] == "79.5 ms (page in 41.7, page out 36.1, swap 1.7)"
    assert rows["beside it"] == "4.1 ms (build 4.1)"
    assert rows["held"] == "10106 tokens, 219.8 MiB"
    assert rows["slot 0"] == "5053 tokens, resident"
    assert rows["weights"] == "loaded once by this engine"


def test_the_json_receipt_is_the_engines_own(home: Home) -> None:
    home.up()
    receipt = home.run("reconfigure", "-c", "32k", "--json").result
    assert receipt["outcome"] == "applied"
    assert receipt["geometry"]["n_ctx"] == 32768
    assert receipt["something_newer"] == {"kept": True}
    unchanged = home.run("reconfigure", "-c", "32k").rows
    assert list(unchanged) == ["unchanged", "before", "after", "usable", "weights"]


def test_a_dry_run_touches_nothing(home: Home) -> None:
    home.up()
    ran = home.run("reconfigure", "-c", "64k", "--dry-run")
    assert ran.code == 0
    assert ran.rows["planned"] == "a dry run; nothing was touched"
    assert ran.rows["would be"] == "65536 tokens: 2 slots of 32768"
    assert "pause" not in ran.rows
    status = home.run("status", "--json").result
    assert status["engine"]["geometry"]["n_ctx"] == 16384
    assert status["drift"] == {}


def test_a_size_per_slot_is_over_the_slots_that_are_asked_for_or_there(home: Home) -> None:
    home.up()
    change = ("reconfigure", "--per-slot", "4k", "--json")
    assert home.run(*change).result["geometry"]["n_ctx"] == 8192
    assert home.run(*change, "-np", "3").result["geometry"]["n_ctx"] == 12288
    assert home.run(*change).result["geometry"]["n_seq"] == 3
    assert home.run("reconfigure", "--kv-unified", "--json").result["geometry"]["kv_unified"]


def test_a_refusal_by_the_engine_is_exit_5_with_the_engines_reason(home: Home) -> None:
    home.up("--fake-refuse", "insufficient_memory")
    ran = home.run("reconfigure", "-c", "1024k", "--json")
    assert ran.code == 5
    assert ran.error["code"] == "insufficient_memory"
    assert ran.error["details"]["bytes_needed"] == 2**40
    assert home.run("status").code == 0


def test_a_stopped_engine_is_exit_3_and_starts_again_as_it_was(home: Home) -> None:
    first = home.up()["pid"]
    home.run("reconfigure", "-c", "32k", "-np", "4")
    assert home.run("stop").out.startswith("engine stopped\nconversations: 2 kept in files (81 ")
    assert home.run("stop", "--json").result["outcome"] == "already_stopped"
    for words in (("-c", "64k"), ("--per-slot", "8k")):
        ran = home.run("reconfigure", *words, "--json")
        assert ran.code == 3
        assert ran.error["code"] == "engine_stopped"
    status = home.run("status")
    assert (status.code, status.rows["engine"]) == (3, "stopped")
    assert home.run("wait").out.startswith("engine stopped")

    started = home.run("start", "--json").result
    assert started["outcome"] == "started"
    assert started["pid"] != first
    geometry = home.run("status", "--json").result["engine"]["geometry"]
    assert (geometry["n_ctx"], geometry["n_seq"]) == (32768, 4)
    restarted = home.run("restart")
    assert (restarted.code, restarted.out.split(",")[0]) == (0, "engine started")
    assert f"pid {started['pid']}," not in restarted.out


def test_a_start_before_any_up_says_that_there_is_none(home: Home) -> None:
    home.up()
    home.run("down")
    home.paths.state_file.unlink()
    with serving():
        home.await_daemon()
        ran = home.run("start", "--json")
        assert (ran.code, ran.error["code"]) == (3, "no_spec")
        home.run("down")


def test_status_tells_the_geometry_the_loads_and_the_drift(home: Home) -> None:
    pid = home.up()["pid"]
    calm = home.run("status")
    assert calm.code == 0
    assert calm.rows["engine"].startswith(f"ready, pid {pid}, up ")
    assert calm.rows["url"] == f"http://127.0.0.1:{home.port}"
    assert calm.rows["weights"] == "loaded once by this engine"
    assert calm.rows["ledger"] == "1 weight load, 0 avoided by reconfiguring"
    assert not {"drift", "last pause", "problem", "last exit", "usable"} & set(calm.rows)

    home.run("reconfigure", "-c", "128k", "-np", "4")
    changed = home.run("status")
    assert changed.rows["context"] == "131072 tokens: 4 slots of 32768"
    assert changed.rows["usable"].startswith("8192 of the 32768")
    assert changed.rows["weights"] == "loaded once by this engine"
    assert changed.rows["ledger"] == "1 weight load, 1 avoided by reconfiguring"
    assert changed.rows["last pause"].startswith("79.5 ms, 16k x 2 -> 128k x 4, 20")
    assert changed.rows["drift"].startswith("n_ctx is 131072, asked: 16384; n_seq is 4, asked: 2")
    assert "(set live 20" in " ".join(changed.out.split())  # the line is broken somewhere
    status = home.run("status", "--json").result
    assert status["drift"]["n_seq"] == {"asked": 2, "live": 4}
    assert status["uptime_s"] >= 0
    assert status["engine"]["last_reconfigure"]["pause_ms"] == 79.5
    assert home.up()["outcome"] == "already_up"


def test_a_page_goes_out_is_listed_and_comes_back(home: Home) -> None:
    home.up()
    assert home.run("pages", "ls").out == "no pages\n"
    out = home.run("pages", "out", "1", "fox")
    assert (out.code, out.rows["page"]) == (0, "fox, out of slot 1")
    assert out.rows["held"] == "41 tokens, 41.0 KiB, 2 checkpoints"
    assert "reusable" not in out.rows
    assert home.run("pages", "ls").rows == {
        "name": "tokens  bytes     checkpoints  age         state",
        "fox": "41      41.0 KiB  2            1 min 23 s  paged out",
    }
    assert home.run("slots").rows == {
        "slot": "state  tokens  window",
        "0": "idle   40      8192",
        "1": "idle   0       8192",
    }
    back = home.run("pages", "in", "fox", "0")
    assert (back.code, back.rows["page"]) == (0, "fox, into slot 0")
    assert back.rows["reusable"] == "41 tokens"
    assert home.run("slots").rows["0"] == "idle   41      8192"
    home.run("pages", "out", "0", "fox")
    dropped = home.run("pages", "drop", "fox")
    assert (dropped.code, dropped.rows["page"]) == (0, "fox, dropped")
    assert home.run("pages", "ls").out == "no pages\n"


def test_the_json_of_pages_and_slots_is_the_engines_own(home: Home) -> None:
    home.up("--fake-parked")
    out = home.run("--json", "pages", "out", "1", "fox").result
    sizes = {"n_tokens": 41, "n_bytes": 41984, "n_checkpoints": 2}
    told = {"ms": 3.25, "something_newer": True}
    assert out == {"id_slot": 1, "page": "fox"} | sizes | told
    parked, fox = home.run("pages", "ls", "--json").result["pages"]
    assert (parked["name"], parked["running"]) == ("parked-1", True)
    told = {"age_s": 83.4, "parked": False, "running": False, "something_newer": True}
    assert fox == {"name": "fox"} | sizes | told
    first, _, last = home.run("slots", "--json").result["slots"]
    assert first == {"id": 0, "n_ctx": 8192, "is_processing": False, "n_prompt_tokens": 40}
    assert (last["page"], last["reason"], last["tokens_fit"]) == ("parked-1", "n_seq", 0)


@pytest.mark.parametrize(
    ("words", "reason", "said"),
    [
        (("in", "fox", "0"), "unknown_page", "there is no page 'fox'"),
        (("drop", "../a b?"), "unknown_page", "there is no page '../a b?'"),
        (("drop", "parked-1"), "request_waiting", "'parked-1' is a request that has not ended"),
        (("out", "0", "a&page=fox"), "bad_name", "'a&page=fox' is no name of a page"),
        (("out", "0", ""), "bad_name", "'' is no name of a page"),
        (("out", "0", "ä/#%41\n"), "bad_name", "'ä/#%41\\n' is no name of a page"),
        (("out", "7", "fox"), "bad_slot", "there is no slot 7"),
        (("spill", "../fox", "--to", "b"), "unknown_page", "there is no page '../fox'"),
        (("spill", "fox", "--to", ""), "bad_name", "Invalid filename"),
        (("spill", "parked-1"), "request_waiting", "'parked-1' is a request that has not ended"),
        (("save", "0", "../fox"), "bad_name", "Invalid filename"),
        (("save", "7", "fox"), "bad_slot", "there is no slot 7"),
        (("restore", "x\n", "0"), "bad_name", "Invalid filename"),
        (("restore", "fox", "0"), "no_file", "there is no page in files 'fox'"),
    ],
)
def test_a_page_verb_that_is_refused_is_exit_5_with_the_engines_reason(
    paged: Home, words: tuple[str, ...], reason: str, said: str
) -> None:
    ran = paged.run("pages", *words, "--json")
    assert (ran.code, ran.error["code"], ran.error["message"]) == (5, reason, said)
    assert ran.error["details"]["reason"] == reason
    shown = paged.run("pages", *words)
    assert (shown.code, shown.out) == (5, "")
    assert f"llamactl: {said}\n" in shown.err
    slots = paged.run("slots", "--json").result["slots"]
    assert [slot["n_prompt_tokens"] for slot in slots] == [40, 41, 7]


def test_a_page_goes_into_files_and_comes_back_into_another_slot(home: Home) -> None:
    home.up()
    home.run("pages", "out", "0", "fox")
    copied = home.run("pages", "spill", "fox", "--to", "a hare")
    assert (copied.code, "dropped" in copied.err) == (0, False)
    assert (copied.rows["file"], copied.rows["page"]) == ("a hare, of page fox", "not dropped")
    moved = home.run("pages", "spill", "fox", "--drop")
    assert (moved.code, "dropped" in moved.err) == (0, False)
    assert moved.rows == {
        "file": "fox, of page fox",
        "page": "dropped",
        "held": "40 tokens, 40.0 KiB, 2 checkpoints",
        "written": "40.5 KiB",
        "took": "4.6 ms",
    }
    assert home.run("pages", "ls").out == "no pages\n"
    written = {path.name for path in home.paths.pages.iterdir()}
    assert written == {"fox", "fox.ckpt", "a hare", "a hare.ckpt"}
    assert home.paths.pages.stat().st_mode & 0o777 == 0o700

    back = home.run("pages", "restore", "fox", "1")
    assert (back.code, "lost" in back.err) == (0, False)
    assert back.rows == {
        "file": "fox, into slot 1",
        "held": "40 tokens, 40.0 KiB, 2 checkpoints",
        "read": "40.5 KiB",
        "reusable": "40 tokens",
        "took": "5.2 ms",
    }
    assert home.run("slots").rows["1"] == "idle   40      8192"
    saved = home.run("pages", "save", "1", "hen")
    assert (saved.code, saved.rows["file"]) == (0, "hen, of slot 1")
    assert home.run("slots").rows["1"] == "idle   40      8192"


def test_the_json_of_a_verb_with_files_is_the_engines_own(home: Home) -> None:
    home.up()
    saved = home.run("pages", "save", "1", "hen", "--json").result
    sizes = {"n_tokens": 41, "n_bytes": 41984, "n_checkpoints": 2, "something_newer": True}
    files = {"id_slot": 1, "filename": "hen"} | sizes
    timings = {"save_ms": 4.6, "engine_ms": 0.1}
    assert saved == files | {"n_written": 42496, "n_saved": 41, "timings": timings}
    back = home.run("pages", "restore", "hen", "1", "--json").result
    timings = {"restore_ms": 5.2, "engine_ms": 0.1}
    read = {"n_read": 42496, "n_restored": 41, "n_reusable": 41, "lost": []}
    assert back == files | read | {"timings": timings}
    home.run("pages", "out", "1", "fox")
    spilled = home.run("pages", "spill", "fox", "--to", "hen", "--drop", "--json").result
    told = {"id_slot": 0, "page": "fox", "n_written": 42496, "dropped": True, "ms": 4.6}
    assert spilled == files | told


def test_what_is_lost_on_the_way_back_is_a_warning(home: Home) -> None:
    home.up()
    home.run("pages", "save", "1", "hen")
    (home.paths.pages / "hen.ckpt").unlink()
    back = home.run("pages", "restore", "hen", "0")
    assert (back.code, back.rows["reusable"]) == (0, "41 tokens")
    assert "lost hen.ckpt: it is missing" in back.err
    scripted = home.run("pages", "restore", "hen", "0", "--json").result
    assert scripted["lost"] == [{"file": "hen.ckpt", "why": "it is missing"}]


def test_a_page_that_was_taken_meanwhile_is_not_said_to_be_dropped(home: Home) -> None:
    home.up("--fake-taken")
    home.run("pages", "out", "1", "fox")
    ran = home.run("pages", "spill", "fox", "--drop")
    assert (ran.code, ran.rows["page"]) == (0, "not dropped")
    assert "page fox was not dropped" in ran.err


def test_a_page_of_another_model_is_refused_with_what_differs(home: Home) -> None:
    home.up()
    home.run("pages", "save", "1", "hen")
    state = {"n_tokens": 41, "model": "/other.gguf"}
    (home.paths.pages / "hen").write_text(json.dumps(state))
    ran = home.run("pages", "restore", "hen", "0", "--json")
    assert (ran.code, ran.error["code"]) == (5, "page_mismatch")
    differs = {"field": "model", "page": "/other.gguf", "server": str(home.model)}
    assert ran.error["details"]["fields"] == [differs]
    shown = home.run("pages", "restore", "hen", "0")
    assert (shown.code, shown.out) == (5, "")
    assert f"model: made for '/other.gguf', there is '{home.model}'" in shown.err
    assert home.run("slots").rows["0"] == "idle   40      8192"


def test_the_users_own_directory_for_pages_is_the_one_that_is_used(home: Home) -> None:
    own = home.root / "own"
    own.mkdir()
    home.up("--slot-save-path", str(own))
    assert home.run("pages", "save", "1", "hen").code == 0
    assert {path.name for path in own.iterdir()} == {"hen", "hen.ckpt"}
    assert list(home.paths.pages.iterdir()) == []


def test_a_page_verb_that_waits_for_its_slot_lets_everything_else_go_on(home: Home) -> None:
    home.up("--fake-busy")
    ran = home.run("pages", "out", "0", "fox", "--timeout", "0.01", "--json")
    assert (ran.code, ran.error["code"]) == (6, "timed_out")
    assert home.run("slots").rows["0"].startswith("busy")
    assert home.run("status").rows["doing"].startswith("page_out the engine takes page 'fox'")
    assert home.run("wait", "--timeout", "5").out.startswith("engine ready")
    assert home.run("pages", "out", "1", "hare").code == 0
    assert home.run("reconfigure", "-np", "4").code == 0  # the fake's slot is free from here on
    with Client(home.paths) as client:
        client.wait_operation(client.operation(ran.error["details"]["operation_id"]), timeout_s=30)
    pages = home.run("pages", "ls", "--json").result["pages"]
    assert {page["name"] for page in pages} == {"fox", "hare"}


def test_a_stop_ends_a_page_verb_that_waits(home: Home) -> None:
    home.up("--fake-busy")
    with Client(home.paths) as client:
        waits = client.page_out("fox", 0)
        stopped = home.run("stop").out.splitlines()
        assert stopped[0] == "engine stopped"
        assert stopped[1].startswith("conversations: 2 kept in files (81 tokens")
        assert stopped[1].endswith("1 request cut)")
        done = client.wait_operation(waits, timeout_s=30).result
    assert isinstance(done, PageReceipt)
    assert done.page == "fox", "the cut freed its slot, and the page is kept as well"
    for words in (
        *(("slots",), ("pages", "ls"), ("pages", "out", "0", "fox")),
        *(("pages", "in", "fox", "0"), ("pages", "drop", "fox"), ("pages", "spill", "fox")),
        *(("pages", "save", "0", "fox"), ("pages", "restore", "fox", "0")),
    ):
        ran = home.run(*words, "--json")
        assert (ran.code, ran.error["code"]) == (3, "engine_stopped")


def test_logs_print_the_last_lines(running: Home) -> None:
    ran = running.run("logs", "-n", "3")
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 3
    lines = [json.loads(line) for line in running.run("logs", "--json").out.splitlines()]
    assert all(line.keys() == {"at", "stream", "text"} for line in lines)
    assert {line["stream"] for line in lines} <= {"stdout", "stderr"}
    assert "flooding " * 7 in [line["text"] for line in lines]
    assert running.run("logs", "-n", "0").out == ""
    whole = running.run("logs").out
    assert len(whole.splitlines()) == 200


def test_what_steers_a_terminal_is_written_out_unless_it_is_asked_for(running: Home) -> None:
    with running.paths.engine_log.open("ab") as log:
        log.write(b"2026-10-02T12:00:00.000Z stderr \x1b]0;owned\x07\tx \xc2\x9b2J\n")
    told = running.run("logs", "-n", "1").out
    assert told.endswith(" \\x1b]0;owned\\x07\tx \\x9b2J\n")
    assert "\x1b]0;owned\x07" in running.run("logs", "-n", "1", "--raw").out
    line = json.loads(running.run("logs", "-n", "1", "--json").out)
    assert line["text"].startswith("\x1b]0;owned\x07")
    assert "\x1b" not in running.run("pages", "drop", "\x1b[2J").err


@pytest.mark.usefixtures("running")
def test_followed_logs_end_quietly_when_their_reader_does() -> None:
    words = " ".join((*COMMAND, "logs", "-f", "-n", "100000"))
    done = subprocess.run(
        f"{words} | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, code = done.stdout.splitlines()
    assert first
    assert (code, done.stderr) == ("0", "")


@pytest.mark.usefixtures("running")
def test_an_interrupted_follow_is_130() -> None:
    words = [*COMMAND, "logs", "-f"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        following.send_signal(2)
        _, err = following.communicate(timeout=20)
    assert (following.returncode, err) == (130, b"llamactl: interrupted\n")


@pytest.mark.usefixtures("running")
def test_a_result_that_nobody_reads_is_no_error() -> None:
    words = [*COMMAND, "status"]
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = subprocess.run(words, stdout=write_fd, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, b"")


def test_env_is_for_a_shell(running: Home) -> None:
    words = " ".join((*COMMAND, "env"))
    shell = f'eval "$({words})"; echo "$OPENAI_BASE_URL $LLAMACTL_CONTROL_SOCKET"'
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    said = f"http://127.0.0.1:{running.port}/v1 {running.paths.control_socket}\n"
    assert (done.stdout, done.stderr) == (said, "")
    env = running.run("env", "--json").result
    assert env["engine_socket"] == running.run("status", "--json").result["engine"]["socket"]


def test_env_and_doctor_tell_of_the_daemons_own_state(
    running: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACTL_STATE_DIR", str(running.root / "other"))
    env = running.run("env", "--json").result
    assert env["state_dir"] == str(running.paths.state)
    assert env["engine_log"] == str(running.paths.engine_log)
    findings = json.loads(running.run("doctor", "--json").out)["findings"]
    told = next(each["found"] for each in findings if each["check"] == "state directory")
    assert told.startswith(f"{running.paths.state}, ")


def test_version_says_when_command_and_daemon_differ(
    running: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = running.root / "llama-server"
    engine.write_text('#!/bin/sh\necho "version: 11312 (0c1e570)" >&2\n')
    same = running.run("version")
    assert (same.code, same.err) == (0, "")
    assert same.rows["llamactl"] == same.rows["daemon"]
    monkeypatch.setattr(versions, "own", lambda: "9.9")
    other = running.run("version")
    assert other.code == 0
    assert f"the daemon is version {same.rows['daemon']}, this command 9.9" in other.err
    engine.chmod(0o700)
    assert versions.of_engine(str(engine)) == "11312 (0c1e570)"
    assert versions.of_engine(str(running.model)) is None
