"""What can be seen of an engine: with its daemon, asleep, and when its daemon is gone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import typer
from cli_home import COMMAND, Home, fresh_home
from llamactl_cli import proc, remains, text
from llamactl_cli.commands.top import Sampler
from llamactl_cli.holdings import SLOTS_MAX
from llamactl_cli.moments import moment
from llamactl_supervisor import ledger
from llamactl_supervisor.models import AvoidedLine, EngineLook, Geometry, LoadLine, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = 80
MAP_FOREVER = """
import mmap, sys
held = []
for path in sys.argv[1:]:
    file = open(path, "rb")
    held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    held[-1][:: mmap.PAGESIZE]
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def lose_daemon(home: Home) -> int:
    """Kill the daemon of a fake engine; return the engine's pid."""
    up = home.up()
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    return int(up["pid"])


def test_status_shows_slots_with_a_bar_pages_and_memory(home: Home) -> None:
    home.up("--fake-parked")
    ran = home.run("status")
    assert (ran.code, ran.err) == (0, "")
    assert ran.rows["slot 0"] == "[#...................]  40 of 8192 tokens"
    assert ran.rows["parked"] == "7 tokens as parked-1, slot 1, its request waits"
    assert ran.rows["pages"] == "1 page, 7.0 KiB, 1 parked"
    assert all(len(line) <= COLUMNS for line in ran.out.splitlines())
    seen = home.run("status", "--json").result
    assert [slot["n_prompt_tokens"] for slot in seen["holds"]["slots"]] == [40, 41, 7]
    memory = seen["memory"]
    parts = ("weights_bytes", "files_bytes", "pages_bytes", "contexts_bytes")
    assert sum(memory[part] for part in parts) == memory["resident_bytes"]
    assert memory["pages_bytes"] == 7 * 1024
    real = psutil.Process(seen["engine"]["pid"]).memory_info().rss
    assert memory["resident_bytes"] == pytest.approx(real, rel=0.1)


def test_status_names_the_last_pauses_the_newest_first(home: Home) -> None:
    home.up()
    for n_ctx in ("32k", "48k", "64k", "128k"):
        home.run("reconfigure", "-c", n_ctx)
    lines = home.run("status").out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("last pause"))
    assert [line[10:].split(", ")[1] for line in lines[first : first + 3]] == [
        *("64k x 2 -> 128k x 2", "48k x 2 -> 64k x 2", "32k x 2 -> 48k x 2"),
    ]
    assert len(home.run("status", "--json").result["pauses"]) == 3


def test_status_lets_an_engine_sleep(home: Home) -> None:
    """The fake one dies of the question for its slots."""
    pid = home.up("--fake-asleep")["pid"]
    ran = home.run("status")
    assert (ran.code, ran.rows["slots"]) == (0, "asleep; `llamactl slots` wakes the engine")
    assert home.run("status", "--json").result["holds"] == {
        "asleep": True,
        "slots": None,
        "pages": [],
    }
    assert proc.start_ticks(pid) is not None


def test_status_does_not_wait_for_a_busy_engine(home: Home) -> None:
    home.up("--fake-mute")
    ran = home.run("status")
    assert ran.code == 0
    assert ran.rows["slots"].startswith("not known: GET /slots: no answer")


def test_committed_memory_is_the_metrics_and_not_zero_before_a_change(home: Home) -> None:
    pid = home.up()["pid"]
    memory = home.run("status", "--json").result["memory"]
    assert memory["committed_bytes"] == psutil.Process(pid).memory_info().data > 0
    assert memory["full_contexts_bytes"] is None
    findings = json.loads(home.run("doctor", "--json").out)["findings"]
    told = next(each["found"] for each in findings if each["check"] == "memory")
    assert "what the engine has committed may take " in told
    assert " 0 B more" not in told


def test_reap_serve_and_completion_keep_to_json(home: Home) -> None:
    home.up()
    for word in ("reap", "serve"):
        ran = subprocess.run([*COMMAND, word, "--json"], capture_output=True, timeout=30)
        assert ran.returncode == 5
        told = json.loads(ran.stderr.splitlines()[-1])["error"]
        assert list(told) == ["code", "message", "hint", "details"]
        assert told["code"] == "daemon_running"
    script = home.run("completion", "bash", "--json").result
    assert script["shell"] == "bash"
    assert script["script"] == home.run("completion", "bash").out.rstrip("\n")


def test_slots_of_an_engine_that_does_not_answer_end_in_time(home: Home) -> None:
    home.up("--fake-mute")
    ran = home.run("slots", "--timeout", "0.5", "--json")
    assert (ran.code, ran.error["code"]) == (6, "timed_out")
    assert "has not answered within 0.5 s" in ran.error["message"]
    stopped = home.run("status", "--json").result["engine"]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert home.run("pages", "ls", "--timeout", "0.5", "--json").code == 6
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_many_slots_are_one_screen(home: Home) -> None:
    words = home.up_words()
    assert home.run(*words, "-np", "64").code == 0
    lines = home.run("status").out.splitlines()
    assert sum(line.startswith("slot ") for line in lines) == SLOTS_MAX + 1
    assert any("56 more, " in line for line in lines)
    assert len(lines) <= 24


def test_status_without_its_daemon_tells_what_is_left(home: Home) -> None:
    pid = lose_daemon(home)
    ran = home.run("status")
    assert ran.code == 4
    assert ran.rows["engine"].startswith(f"runs without a daemon, pid {pid}, up ")
    assert "`llamactl up` adopts it" in ran.err
    seen = json.loads(home.run("status", "--json").out)
    assert seen["daemon"] is None
    engine = seen["engines"][0]
    assert (engine["pid"], engine["model"]) == (pid, str(home.model))
    assert engine["memory"]["resident_bytes"] > 0


def test_the_ledger_reads_the_same_with_and_without_a_daemon(home: Home) -> None:
    home.up()
    home.run("reconfigure", "-c", "128k", "-np", "4")
    ran = home.run("ledger")
    header, load, avoided = ran.out.splitlines()[:3]
    assert header.split() == ["when", "what", "by", "took", "of"]
    assert "load: up" in load
    assert load.endswith("24 B, 16k x 2")
    assert "avoided" in avoided
    assert avoided.endswith("79.5 ms  16k x 2 > 128k x 4")
    assert all(len(line) <= COLUMNS for line in ran.out.splitlines())
    seen = home.run("ledger", "--json").result
    assert (seen["sums"]["loads"], seen["sums"]["loads_avoided"]) == (1, 1)
    assert seen["sums"]["pause_s"] == 0.0795
    assert [line["kind"] for line in home.run("ledger", "-n", "1", "--json").result["lines"]] == [
        "avoided"
    ]
    assert home.run("ledger", "--since", "2100-01-01").out == "no lines\n"
    home.run("down")
    assert home.run("ledger").out == ran.out


def test_what_was_saved_is_an_estimate_from_the_median_load(home: Home) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    shape: dict[str, Any] = {"n_ctx": 16384, "n_seq": 2}
    load: dict[str, Any] = {"at": at, "generation": 1, "cause": "up", "by": "me", "model": "/m"}
    load |= {"model_bytes": None} | shape
    home.paths.state.mkdir()
    for load_s, loaded in ((1.0, True), (2.0, True), (30.0, True), (60.0, False)):
        line = LoadLine(load_s=load_s, loaded=loaded, **load)
        ledger.append(home.paths.ledger_file, line)
    both = Geometry(**shape)
    change: dict[str, Any] = {"at": at, "by": "me", "tokens_held": 0}
    for _ in range(3):
        avoided = AvoidedLine(pause_ms=500.0, previous=both, geometry=both, **change)
        ledger.append(home.paths.ledger_file, avoided)
    assert home.run("ledger", "--json").result["sums"] == {
        "loads": 3,
        "loads_failed": 1,
        "load_s": 33.0,
        "loads_avoided": 3,
        "pause_s": 1.5,
        "saved_s": 4.5,
    }
    rows = home.run("ledger").rows
    assert rows["loads"] == "3, 33 s in all, 1 failed"
    assert rows["saved"].startswith("about 4.5 s (estimate")


def test_an_engine_of_a_living_daemon_is_no_orphan(home: Home) -> None:
    home.up()
    assert home.run("orphans").out == "no orphans\n"
    assert home.run("orphans", "--end", "--json").result["orphans"] == []
    assert home.run("status").code == 0


def test_a_proven_orphan_is_named_and_ended(home: Home) -> None:
    pid = lose_daemon(home)
    ran = home.run("orphans")
    assert (ran.code, ran.err) == (1, "")
    assert ran.rows["engine"].startswith(f"pid {pid}, up ")
    assert "`llamactl up` takes it over" in ran.rows["do"]
    ended = home.run("orphans", "--end", "--json")
    assert ended.code == 0
    assert [(each["pid"], each["ended"]) for each in json.loads(ended.out)["orphans"]] == [
        (pid, True)
    ]
    assert not psutil.pid_exists(pid) or proc.start_ticks(pid) is None
    assert home.run("orphans").code == 0
    assert home.up()["pid"] != pid


def test_an_orphan_that_ignores_term_is_killed(home: Home) -> None:
    up = home.up("--fake-ignore-term")
    daemon = psutil.Process(up["daemon_pid"])
    daemon.kill()
    daemon.wait(10)
    assert home.run("orphans", "--end").code == 0
    assert proc.start_ticks(up["pid"]) is None


@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_proven_is_never_signalled(home: Home, *, named: bool) -> None:
    pid = lose_daemon(home)
    for record in home.paths.runtime.glob("engine-*/holder.json"):
        aside = record.rename(home.root / "holder.json")
    if not named:
        home.paths.state_file.unlink()
    ran = home.run("orphans", "--end", "--json")
    assert ran.code == 1
    [orphan] = json.loads(ran.out)["orphans"]
    assert (orphan["pid"], orphan["proven"], orphan["ended"]) == (pid, False, False)
    assert "record is gone" in orphan["doubt"]
    assert proc.start_ticks(pid) is not None
    assert f"kill {pid}" in home.run("orphans").rows["do"]
    aside.rename(record)
    assert home.run("orphans", "--end").code == 0
    assert proc.start_ticks(pid) is None


def test_a_record_that_others_could_have_written_proves_nothing(home: Home) -> None:
    pid = lose_daemon(home)
    home.paths.runtime.chmod(0o777)
    [orphan] = json.loads(home.run("orphans", "--end", "--json").out)["orphans"]
    assert (orphan["pid"], orphan["proven"]) == (pid, False)
    assert proc.start_ticks(pid) is not None
    home.paths.runtime.chmod(0o700)


def test_another_process_of_that_pid_is_not_ended() -> None:
    """Its start differs: the pid was reused."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ticks = proc.start_ticks(other.pid)
        assert ticks is not None
        wrong = remains.Remnant(other.pid, ticks - 1, "engine", "x", adoptable=True, doubt=None)
        assert remains.end(wrong, 0.1)
        assert other.poll() is None
        assert remains.end(
            remains.Remnant(other.pid, ticks, "engine", "x", adoptable=True, doubt=None), 10
        )
        assert other.wait(10) == -signal.SIGTERM


def test_memory_is_told_by_what_is_mapped(tmp_path: Path) -> None:
    """Weights by their ending or by the model's own name, though it was removed meanwhile."""
    files = [tmp_path / name for name in ("a b.gguf", "named", "other")]
    for number, file in enumerate(files, 1):
        file.write_bytes(b"x" * number * 2**20)
    command = [sys.executable, "-c", MAP_FOREVER, *map(str, files)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with_both = proc.resident(child.pid, str(files[1]))
        files[0].unlink()
        without = proc.resident(child.pid, None)
        rss = psutil.Process(child.pid).memory_info().rss
        child.kill()
    assert with_both is not None
    assert without is not None
    assert with_both.weights_bytes == 3 * 2**20
    assert without.weights_bytes == 2**20
    assert without.files_bytes - with_both.files_bytes == 2 * 2**20
    assert with_both.total_bytes == without.total_bytes == pytest.approx(rss, rel=0.1)


def test_nobody_has_no_memory_and_no_age() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert proc.resident(gone.pid, None) is None
    assert proc.age_s(gone.pid) is None
    assert (proc.age_s(os.getpid()) or 0) > 0


@pytest.mark.parametrize(
    ("said", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("24h", timedelta(days=1)),
        ("2w", timedelta(weeks=2)),
    ],
)
def test_a_span_is_so_long_ago(said: str, ago: timedelta) -> None:
    assert abs(datetime.now(UTC) - ago - moment(said)) < timedelta(seconds=5)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2026-10-02", datetime(2026, 10, 2).astimezone()),
        ("2026-10-02T12:30", datetime(2026, 10, 2, 12, 30).astimezone()),
        ("2026-10-02 12:30:05", datetime(2026, 10, 2, 12, 30, 5).astimezone()),
        ("2026-10-02T12:30Z", datetime(2026, 10, 2, 12, 30, tzinfo=UTC)),
        ("2026-10-02T12:30+02:00", datetime(2026, 10, 2, 10, 30, tzinfo=UTC)),
    ],
)
def test_a_date_is_local_unless_it_says_so(said: str, meant: datetime) -> None:
    assert moment(said) == meant


def test_a_time_is_of_today() -> None:
    now = datetime.now().astimezone()
    assert moment("00:00") == now.replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.mark.parametrize(
    "said", ["", "10", "10y", "-5m", "25:00", "2026-13-01", "999999w", "yesterday", "0001-01-01"]
)
def test_what_is_no_moment_is_a_usage_error(home: Home, said: str) -> None:
    with pytest.raises(typer.BadParameter):
        moment(said)
    ran = home.run("ledger", "--json", "--since", said)
    assert (ran.code, ran.error["code"]) == (2, "invalid_request")


def test_a_screen_has_80_columns_and_breaks_no_word() -> None:
    long = " ".join(["word"] * 40)
    lines = text.screen([("key", long), ("b", None), ("c", "x")]).splitlines()
    assert all(len(line) <= COLUMNS for line in lines)
    assert " ".join(lines[:-1]).split() == ["key", *long.split()]
    assert lines[-1] == "c    x"


def test_a_path_is_shortened_in_the_middle() -> None:
    assert text.middle("/short", 10) == "/short"
    said = text.middle("/home/somebody/models/" + "a" * 60 + "/model-q4.gguf", 40)
    assert len(said) == 40
    assert said.startswith("/home/somebod...")
    assert said.endswith("/model-q4.gguf")


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [
        *((0, 10, "....."), (1, 1000, "#...."), (5, 10, "##..."), (10, 10, "#####")),
        *((11, 10, "#####"), (0, 0, "....."), (1, 0, "#....")),
    ],
)
def test_a_bar_is_full_only_when_it_is(part: int, whole: int, said: str) -> None:
    assert text.bar(part, whole, 5) == said


def look_of(*held: int) -> EngineLook:
    slots = tuple(
        SlotState(id=number, n_ctx=8192, n_prompt_tokens=count) for number, count in enumerate(held)
    )
    parked = SlotState(id=0, n_ctx=8192, n_prompt_tokens=9, parked=True, page="parked-0")
    return EngineLook(asleep=False, slots=(*slots, parked), pages=())


def test_rates_are_what_the_slots_grew_by() -> None:
    sampler = Sampler()
    assert sampler.rates(look_of(40, 41), 10.0) == {}
    assert sampler.rates(look_of(70, 41), 12.0) == {0: 15.0, 1: 0.0}
    assert sampler.rates(look_of(5, 43, 60), 13.0) == {1: 2.0}
    assert sampler.rates(None, 14.0) == {}
    assert sampler.rates(look_of(5), 15.0) == {}


def test_top_without_a_terminal_is_one_frame(home: Home) -> None:
    home.up()
    ran = home.run("top")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0].endswith("  0.0 tok/s in all slots")
    assert ran.rows["slot 0"] == "[#...................]  40 of 8192 tokens, 0.0 tok/s"
    assert "\x1b" not in ran.out
    seen = home.run("top", "--once", "--json").result
    assert seen["tokens_per_s"] == {"0": 0.0, "1": 0.0}
    home.run("stop")
    assert home.run("top").code == 3


def test_top_on_a_terminal_outlives_the_daemon_and_ends_with_q(home: Home) -> None:
    up = home.up()
    with on_terminal("top") as (child, terminal):
        read_until(terminal, b"[#...................]  40 of 8192 tokens, 0.0 tok/s")
        daemon = psutil.Process(up["daemon_pid"])
        daemon.kill()
        daemon.wait(10)
        read_until(terminal, b"lost; trying again")
        assert home.up()["pid"] == up["pid"]
        read_until(terminal, b"40 of 8192 tokens")
        os.write(terminal, b"q")
        read_until(terminal, b"\x1b[?1049l")
        assert child.wait(20) == 0


def test_an_interrupt_ends_top_and_gives_the_terminal_back(home: Home) -> None:
    home.up()
    with on_terminal("top") as (child, terminal):
        read_until(terminal, b"slot 0")
        os.write(terminal, b"\x03")
        read_until(terminal, b"\x1b[?1049l")
        assert child.wait(20) == 0
        after = termios.tcgetattr(terminal)
    assert after[3] & termios.ECHO
    assert after[3] & termios.ICANON


@contextlib.contextmanager
def on_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command on a terminal of 80 columns of its own; yield it and the terminal's end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    child = subprocess.Popen(
        [*COMMAND, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},
        preexec_fn=partial(own_terminal, theirs),
    )
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait()
        os.close(theirs)
        os.close(ours)


def own_terminal(terminal: int) -> None:
    """In the child: be the foreground of the terminal, so that Ctrl-C arrives as a signal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Read what is drawn until `wanted` is part of it."""
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, f"{wanted!r} is not in {seen[-2000:]!r}"
        seen += os.read(terminal, 65536)
    return seen
