"""`llamactl pages fsck` and `gc` with a scripted program, and once with the real one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cli_home import COMMAND, Home, fresh_home
from live_engine import live_engine
from llamactl_builder import build as builder
from llamactl_builder import models
from llamactl_builder.progress import Progress
from sandbox import FAKE_ENGINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llamactl_builder.progress import ProgressCallback
    from tiny_models import TinyModels

    Script = Callable[..., Path]

SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$@" > {said}
cat {lines}
{end}
"""
WHOLE = {"what": "whole", "name": "hare", "n_bytes": 2048}
PLAIN = {"what": "plain", "name": "old", "n_bytes": 512}
LOST = [{"file": "fox.dft", "why": "it is missing"}]
DEGRADED = {"what": "degraded", "name": "fox", "n_bytes": 1024, "losses": LOST}
DAMAGED = {"what": "damaged", "name": "owl", "n_bytes": 4096, "why": "'owl' is damaged",
           "to": "/pages/.quarantine/owl-1", "done": True}  # fmt: skip
ORPHAN = {"what": "orphan", "name": "elk.ckpt", "n_bytes": 1024, "why": "no 'elk'",
          "to": "/pages/.quarantine/elk-1", "done": True}  # fmt: skip
STAGING = {"what": "damaged", "name": "hare.page-staging", "why": "'hare' cannot be completed",
           "to": "/pages/.quarantine/hare-1", "done": True}  # fmt: skip
WAITING = {"what": "waiting", "name": "", "why": "another process holds /pages/.page-lock, waiting"}
OLD = {"what": "quarantined", "name": ".quarantine/emu-1", "n_bytes": 3072, "removes": True}
EMPTY = {"n_bytes": 0, "why": "", "losses": [], "to": "", "removes": False, "done": False}


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


@pytest.fixture
def script(home: Home, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Put a program beside an engine that is built; it writes its arguments to a file."""

    def script(*rows: Any, end: str = "exit 0", beside: Path = home.root / "built") -> Path:
        beside.mkdir(exist_ok=True)
        said, lines, program = (beside / name for name in ("said", "lines", "llama-page-files"))
        texts = [row if isinstance(row, str) else json.dumps(EMPTY | row) for row in rows]
        lines.write_text("".join(text + "\n" for text in texts))
        program.write_text(SCRIPT.format(said=said, lines=lines, end=end))
        program.chmod(0o755)
        return said

    monkeypatch.setattr(builder, "built_engine", lambda _: home.root / "built" / "llama-server")
    return script


def test_a_sound_directory_is_exit_0_with_a_table_and_a_verdict(home: Home, script: Script) -> None:
    said = script(WHOLE, PLAIN)
    ran = home.run("pages", "fsck")
    assert (ran.code, ran.out.splitlines()) == (0, [
        "state  name  bytes    what about it",
        "whole  hare  2.0 KiB",
        "plain  old   512 B",
        f"{home.paths.pages}: 2 pages: 1 whole, 1 plain",
    ])  # fmt: skip
    assert said.read_text().splitlines() == ["fsck", str(home.paths.pages)]


def test_damage_is_exit_1_and_says_where_it_went(home: Home, script: Script) -> None:
    script(WHOLE, STAGING, DEGRADED, DAMAGED, ORPHAN, end="exit 1")
    ran = home.run("pages", "fsck", "/pages")
    assert (ran.code, ran.out.splitlines()[1:]) == (1, [
        "whole     hare               2.0 KiB",
        "damaged   hare.page-staging           "
        "'hare' cannot be completed; moved to /pages/.quarantine/hare-1",
        "degraded  fox                1.0 KiB  fox.dft: it is missing",
        "damaged   owl                4.0 KiB  'owl' is damaged; moved to /pages/.quarantine/owl-1",
        "orphan    elk.ckpt           1.0 KiB  no 'elk'; moved to /pages/.quarantine/elk-1",
        "/pages: 3 pages: 1 whole, 1 degraded, 1 damaged; 1 file without a page; "
        "1 publication that cannot be completed; 3 put aside, nothing was deleted",
    ])  # fmt: skip
    found = home.run("pages", "fsck", "/pages", "--json")
    assert (found.code, found.result["directory"], found.result["dry_run"]) == (1, "/pages", False)
    assert found.result["findings"] == [
        EMPTY | finding for finding in (WHOLE, STAGING, DEGRADED, DAMAGED, ORPHAN)
    ]
    assert found.result["verdict"] == ran.out.splitlines()[-1]


def test_a_name_steers_no_terminal_and_makes_up_no_row(home: Home, script: Script) -> None:
    script(WHOLE | {"name": "x\x1b[31m\u202e\nwhole  fake"})
    row, verdict = home.run("pages", "fsck").out.splitlines()[1:]
    assert row.split("  ")[:2] == ["whole", "x\\x1b[31m\\u202e\\nwhole"]
    assert verdict == f"{home.paths.pages}: 1 page: 1 whole"


def test_a_dry_run_is_passed_on_and_says_so(home: Home, script: Script) -> None:
    said = script(DAMAGED | {"done": False, "to": "/pages/.quarantine"}, end="exit 1")
    ran = home.run("pages", "fsck", "/pages", "--dry-run")
    assert said.read_text().splitlines() == ["fsck", "/pages", "--dry-run"]
    assert ran.out.splitlines()[1:] == [
        "damaged  owl   4.0 KiB  'owl' is damaged; to be moved to /pages/.quarantine",
        "/pages: 1 page: 1 damaged; dry run, nothing was changed",
    ]
    script(OLD | {"name": ".quarantine/elk-1", "n_bytes": 1024}, OLD)
    assert home.run("pages", "gc", "/pages", "--dry-run").out.splitlines()[-1] == (
        "/pages: 2 to be removed, 4.0 KiB; dry run, nothing was changed"
    )


def test_who_waits_for_another_process_is_told_at_once_and_that_is_no_finding(
    home: Home, script: Script
) -> None:
    goes_on = home.root / "goes on"
    said = script(WAITING)
    program = said.with_name("llama-page-files")
    program.write_text(f"""\
#!/bin/sh
cat {said.with_name("lines")}
n=0
while ! [ -e '{goes_on}' ] && [ $n -lt 400 ]; do n=$((n + 1)); sleep 0.05; done
echo '{json.dumps(EMPTY | WHOLE)}'
""")
    words = (*COMMAND, "pages", "fsck", "/pages")
    beside = ("--engine", str(said.with_name("llama-server")))
    shutil.copy(FAKE_ENGINE, said.with_name("llama-server"))
    with subprocess.Popen(
        (*words, *beside), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == f"{WAITING['why']}\n"
        goes_on.touch()
        out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert out.splitlines()[1:] == ["whole  hare  2.0 KiB", "/pages: 1 page: 1 whole"]
    found = home.run(*words[len(COMMAND) :], *beside, "--json").result
    assert [row["what"] for row in found["findings"]] == ["whole"]


def test_gc_says_every_name_and_its_bytes(home: Home, script: Script) -> None:
    said = script(OLD | {"name": ".quarantine/elk-1", "done": True}, OLD | {"done": True})
    ran = home.run("pages", "gc", "/pages", "--days", "7")
    assert said.read_text().splitlines() == ["gc", "/pages", "--days", "7"]
    assert (ran.code, ran.out.splitlines()[1:]) == (0, [
        "quarantined  .quarantine/elk-1  3.0 KiB  removed",
        "quarantined  .quarantine/emu-1  3.0 KiB  removed",
        "/pages: 2 removed, 6.0 KiB",
    ])  # fmt: skip
    script()
    assert home.run("pages", "gc", "/pages").out == "/pages: nothing to remove\n"
    assert home.run("pages", "fsck", "/pages").out == "/pages: no pages\n"
    assert said.read_text().splitlines() == ["fsck", "/pages"]


def test_what_could_not_be_done_is_exit_2_and_the_rest_is_shown(home: Home, script: Script) -> None:
    script(WHOLE, {"what": "failed", "name": "owl", "why": "read /pages/owl: EIO"}, end="exit 2")
    ran = home.run("pages", "fsck", "/pages")
    assert (ran.code, ran.rows["failed"]) == (2, "owl            read /pages/owl: EIO")
    assert ran.out.endswith("1 whole; 1 could not be read or done, see above\n")


def test_a_directory_that_cannot_be_read_is_a_usage_error(home: Home, script: Script) -> None:
    why = "/pages: there is no such directory"
    script({"what": "failed", "name": "", "why": why}, end="exit 2")
    ran = home.run("pages", "fsck", "/pages", "--json")
    assert (ran.code, ran.error["code"]) == (2, "page_files_unreadable")
    assert ran.error["message"] == why


@pytest.mark.parametrize(
    ("rows", "end", "said"),
    [
        (("no JSON",), "exit 0", "makes no sense"),
        (({"what": "whole"},), "exit 0", "makes no sense"),
        (("[1]",), "exit 0", "makes no sense"),
        ((), "echo of itself >&2; exit 2", "ended with 2: of itself"),
        ((WHOLE,), "kill -9 $$", "ended with -9"),
    ],
    ids=["no-json", "half", "list", "no-word", "killed"],
)
def test_a_program_that_fails_is_no_verdict(
    home: Home, script: Script, rows: tuple[Any, ...], end: str, said: str
) -> None:
    script(*rows, end=end)
    ran = home.run("pages", "fsck", "/pages", "--json")
    assert (ran.code, ran.error["code"]) == (1, "page_files_failed")
    assert said in ran.error["message"]


def test_an_end_by_a_signal_is_the_programs_end_too(home: Home, script: Script) -> None:
    """What it did later would be told to nobody."""
    said = script(WAITING)
    pid = home.root / "pid"
    program = said.with_name("llama-page-files")
    program.write_text(f"""\
#!/bin/sh
echo $$ > {pid}
cat {said.with_name("lines")}
exec sleep 60
""")
    shutil.copy(FAKE_ENGINE, said.with_name("llama-server"))
    beside = ("--engine", str(said.with_name("llama-server")))
    words = (*COMMAND, "pages", "fsck", "/pages", *beside)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == f"{WAITING['why']}\n"
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{int(pid.read_text())}").exists()


def test_an_empty_directory_name_is_a_slip_and_not_the_working_directory(home: Home) -> None:
    for verb in ("fsck", "gc"):
        ran = home.run("pages", verb, "")
        assert (ran.code, ran.out) == (2, "")
        assert "the name of the directory is empty" in ran.err


@pytest.mark.parametrize("days", ["-1", "36501", "soon", ""])
def test_days_out_of_range_are_a_usage_error(home: Home, days: str) -> None:
    ran = home.run("pages", "gc", "--days", days)
    assert (ran.code, ran.out) == (2, "")
    assert "a number of days from 0 to 36500" in ran.err


@pytest.mark.parametrize("option", ["--slot-save-path", "--slot_save_path"])
def test_with_a_daemon_it_is_the_program_and_the_directory_of_its_engine(
    home: Home, script: Script, option: str
) -> None:
    engine = home.root / "given" / "llama-server"
    engine.parent.mkdir()
    shutil.copy(FAKE_ENGINE, engine)
    other = script({"what": "plain", "name": "other program"})
    said = script(WHOLE, beside=engine.parent)
    options = ("--", option, str(home.root / "kept"))
    assert home.run(*home.up_words(engine=engine), *options).code == 0
    assert home.run("pages", "fsck").rows["whole"] == "hare  2.0 KiB"
    assert said.read_text().splitlines() == ["fsck", str(home.root / "kept")]
    assert home.run("pages", "gc", "/pages").code == 0
    assert said.read_text().splitlines() == ["gc", "/pages", "--days", "30"]
    assert not other.exists()


def test_the_program_beside_a_given_engine_comes_first(home: Home, script: Script) -> None:
    other = script({"what": "plain", "name": "other program"})
    engine = home.root / "given" / "llama-server"
    engine.parent.mkdir()
    shutil.copy(FAKE_ENGINE, engine)
    for verb in ("fsck", "gc"):
        ran = home.run("pages", verb, "/pages", "--engine", str(engine))
        assert ran.code == 2
        assert "there is no llama-page-files beside" in ran.err
    said = script(WHOLE, beside=engine.parent)
    for verb in ("fsck", "gc"):
        assert home.run("pages", verb, "/pages", "--engine", str(engine)).code == 0
        assert said.read_text().splitlines()[0] == verb
    ran = home.run("pages", "fsck", "--engine", str(home.root / "nowhere"))
    assert ran.code == 2
    assert "is not a program" in ran.err
    assert not other.exists()


def test_without_a_built_engine_the_program_is_built_alone_and_no_model_is_fetched(
    home: Home, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("an engine or a model is asked for")

    def ensure_programs(*, progress: ProgressCallback) -> builder.ToolsBuild:
        progress(Progress("compiling", 1, 2))
        return builder.ToolsBuild(said.parent, cached=False)

    said = script(WHOLE)
    monkeypatch.setattr(builder, "built_engine", lambda _: None)
    monkeypatch.setattr(builder, "ensure_programs", ensure_programs)
    monkeypatch.setattr(builder, "ensure_engine", never)
    monkeypatch.setattr(models, "ensure_default_model", never)
    ran = home.run("pages", "fsck", "/pages")
    assert (ran.code, ran.rows["whole"]) == (0, "hare  2.0 KiB")
    assert "compiling 1/2" in ran.err


def test_a_directory_of_the_engine_that_is_relative_must_be_named(
    home: Home, script: Script
) -> None:
    script(WHOLE)
    assert home.run(*home.up_words(), "--", "--slot-save-path", "kept").code == 0
    ran = home.run("pages", "fsck")
    assert (ran.code, ran.out) == (2, "")
    assert "name the directory" in ran.err
    assert home.run("pages", "fsck", "/pages").code == 0


def test_the_real_program_beside_a_real_engine(
    home: Home, engine_path: Path, tiny: TinyModels, tmp_path: Path
) -> None:
    """Two saved conversations, one damaged: the other is whole, both before and after."""
    ask = {"temperature": 0, "n_predict": 4, "prompt": list(range(10, 60)), "id_slot": 0}
    with live_engine(
        engine_path, tiny.model("llama-dense"), "--slot-save-path", str(tmp_path)
    ) as live:
        live.ask("/completion", **ask)
        for name in ("good", "bad", "gone"):
            assert live.file(0, "save", name).status == 200
        beside = ("--engine", str(engine_path))
        assert home.run("pages", "fsck", str(tmp_path), *beside).code == 0

        damaged = bytearray((tmp_path / "bad").read_bytes())
        damaged[-1] ^= 1
        (tmp_path / "bad").write_bytes(damaged)
        (tmp_path / "gone").unlink()
        dry = home.run("pages", "fsck", str(tmp_path), *beside, "--dry-run", "--json")
        found = home.run("pages", "fsck", str(tmp_path), *beside, "--json")
        for ran, done in ((dry, False), (found, True)):
            states = [(row["name"], row["what"], row["done"]) for row in ran.result["findings"]]
            assert (ran.code, states) == (1, [
                ("bad", "damaged", done), ("gone.ckpt", "orphan", done), ("good", "whole", False),
            ])  # fmt: skip
        assert (tmp_path / ".quarantine/bad-1/bad").read_bytes() == damaged
        assert (tmp_path / ".quarantine/gone-1/gone.ckpt").is_file()
        assert live.file(0, "restore", "good").receipt["lost"] == []
        assert live.file(0, "restore", "bad").error["reason"] == "no_file"

        young = home.run("pages", "gc", str(tmp_path), *beside, "--json").result["findings"]
        words = ("pages", "gc", str(tmp_path), *beside, "--days", "0", "--json")
        swept = home.run(*words).result["findings"]
        for rows, done in ((young, False), (swept, True)):
            assert [(row["name"], row["done"]) for row in rows] == [
                (".quarantine/bad-1", done), (".quarantine/gone-1", done),
            ]  # fmt: skip
        assert swept[0]["n_bytes"] > len(damaged)
        assert home.run("pages", "fsck", str(tmp_path), *beside).code == 0
        assert live.file(0, "restore", "good").status == 200
    nowhere = home.run("pages", "fsck", str(tmp_path / "nowhere"), *beside)
    assert nowhere.code == 2
    assert f"{tmp_path / 'nowhere'}: there is no such directory" in nowhere.err
