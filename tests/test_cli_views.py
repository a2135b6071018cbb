"""What a person reads: numbers, tables, and the states that a test cannot wait for."""

from __future__ import annotations

import os
import pwd
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from llamactl_cli import text
from llamactl_cli.commands.ledger import LedgerView
from llamactl_cli.commands.logs import LogLine
from llamactl_cli.commands.page_files import FileView
from llamactl_cli.commands.pages import PagesView, PageView
from llamactl_cli.commands.slots import SlotsView
from llamactl_cli.commands.status import StatusView
from llamactl_cli.session import ends_at_logout
from llamactl_cli.views import LifecycleView, ReceiptView
from llamactl_supervisor.config import Paths
from llamactl_supervisor.models import (
    CarriedConversation,
    CarryFate,
    CarryReport,
    FileReceipt,
    Geometry,
    Ledger,
    LifecycleOutcome,
    LifecycleResult,
    PageReceipt,
    Pages,
    Problem,
    Receipt,
    Slots,
    Status,
    Totals,
)

NOON = datetime(2026, 10, 2, 12, 0, tzinfo=UTC).isoformat()
SMALL = {"n_ctx": 8192, "n_seq": 2, "n_ctx_seq": 4096, "n_ctx_slot": 4096, "kv_unified": False}
BIG = {"n_ctx": 32768, "n_seq": 2, "n_ctx_seq": 16384, "n_ctx_slot": 16384, "kv_unified": False}


def rows_of(table: str) -> dict[str, str]:
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in table.splitlines()}


@pytest.mark.parametrize(
    ("value_s", "said"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (10.4, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (260, "4 min 20 s"),
        (3600, "1 h 0 min"),
        (172800, "2 d 0 h"),
    ],
)
def test_time_spans(value_s: float, said: str) -> None:
    assert text.seconds(value_s) == said


@pytest.mark.parametrize(
    ("n_bytes", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (230521516, "219.8 MiB"),
        (2**40, "1024.0 GiB"),
    ],
)
def test_sizes(n_bytes: int, said: str) -> None:
    assert text.size(n_bytes) == said


@pytest.mark.parametrize(
    ("change", "shape", "usable"),
    [
        ({}, "8192 tokens: 2 slots of 4096", None),
        ({"n_seq": 1}, "8192 tokens: 1 slot of 4096", None),
        ({"n_ctx_slot": 1024}, "8192 tokens: 2 slots of 4096", "1024 of the 4096"),
        ({"kv_unified": True, "n_ctx_slot": 8192}, "8192 tokens shared by 2 slots", None),
        ({"kv_unified": True}, "8192 tokens shared by 2 slots", "4096 of the 8192"),
        ({"n_ctx_seq": None, "n_ctx_slot": None}, "8192 tokens: 2 slots of 4096", None),
    ],
)
def test_geometries(change: dict[str, Any], shape: str, usable: str | None) -> None:
    geometry = Geometry.model_validate(SMALL | change)
    assert text.geometry(geometry) == shape
    said = text.usable(geometry)
    assert (said is None) if usable is None else (said or "").startswith(usable)


def test_a_plan_names_what_would_be_parked() -> None:
    parked = {"slot": 1, "tokens_held": 6000, "tokens_fit": 4096, "reason": "window"}
    receipt = Receipt.model_validate(
        {"outcome": "planned", "previous": BIG, "geometry": SMALL, "parked": [parked]}
        | {"bytes_needed": {"CPU": 2**30}}
    )
    rows = rows_of(ReceiptView(receipt).text())
    assert rows["needs"] == "1.0 GiB on CPU"
    assert rows["slot 1"] == "would be parked whole (window): holds 6000 tokens, 4096 fit"
    assert {"pause", "weights", "beside it"} & set(rows) == set()


def test_a_receipt_tells_of_a_parked_slot_once_and_how_it_comes_back() -> None:
    parked = {"slot": 1, "tokens_held": 60, "tokens_fit": 0, "reason": "n_seq", "running": True}
    slots = [
        {"slot": 0, "tokens": 9, "fate": "resident"},
        {"slot": 1, "tokens": 60, "fate": "parked"},
    ]
    receipt = Receipt.model_validate(
        {"outcome": "applied", "previous": BIG, "geometry": SMALL, "parked": [parked]}
        | {"slots": slots}
    )
    said = ReceiptView(receipt).text()
    rows = rows_of(said)
    assert rows["slot 0"] == "9 tokens, resident"
    assert rows["slot 1"] == "parked whole (n_seq): holds 60 tokens, 0 fit, its request waits"
    assert "places it back" in rows["parked"]
    assert said.count("slot 1") == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"from": 3}, "48 tokens, placed from slot 3"),
        ({"from": 0}, "48 tokens, placed"),
        ({}, "48 tokens, placed"),
    ],
)
def test_a_receipt_says_which_slot_one_had_that_is_placed_in_another(
    told: dict[str, Any], said: str
) -> None:
    placed = {"slot": 0, "tokens": 48, "fate": "placed"} | told
    receipt = Receipt.model_validate(
        {"outcome": "applied", "previous": BIG, "geometry": SMALL, "slots": [placed]}
    )
    view = ReceiptView(receipt)
    assert rows_of(view.text())["slot 0"] == said
    assert view.data()["slots"] == [placed]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    said = text.columns(("a", "long name", "b"), [("wide cell", "1", "x"), ("", "2", "")])
    assert said.splitlines() == [
        "a          long name  b",
        "wide cell  1          x",
        "           2",
    ]


def test_pages_tell_size_age_and_who_waits() -> None:
    sizes = {"n_tokens": 5053, "n_bytes": 115260758, "n_checkpoints": 2, "age_s": 260.2}
    listed: list[dict[str, Any]] = [
        {"name": "fox"} | sizes,
        {"name": "parked-1", "n_tokens": 7, "n_bytes": 512, "parked": True, "age_s": 0.31},
        {"name": "parked-22", "n_tokens": 7, "n_bytes": 512, "parked": True, "running": True},
    ]
    view = PagesView(Pages.model_validate({"pages": listed}))
    assert view.text().splitlines() == [
        "name       tokens  bytes      checkpoints  age         state",
        "fox        5053    109.9 MiB  2            4 min 20 s  paged out",
        "parked-1   7       512 B      0            0.3 s       parked",
        "parked-22  7       512 B      0            0.0 s       parked, its request waits",
    ]
    assert view.data() == {"pages": listed}
    assert PagesView(Pages(pages=())).text() == "no pages"
    assert PagesView(Pages(pages=())).data() == {"pages": []}


def test_slots_tell_what_they_hold_and_what_is_parked() -> None:
    parked = {"id": 1, "n_ctx": 4096, "n_prompt_tokens": 60, "parked": True, "page": "parked-1"}
    listed: list[dict[str, Any]] = [
        {"id": 0, "n_ctx": 8192, "is_processing": True, "n_prompt_tokens": 5053},
        {"id": 1, "n_ctx": 8192, "speculative": False},
        parked,
        parked | {"id": 12, "is_processing": True, "page": "parked-2"},
    ]
    view = SlotsView(Slots.model_validate({"slots": listed}))
    assert view.text().splitlines() == [
        "slot  state                                  tokens  window",
        "0     busy                                   5053    8192",
        "1     idle                                   -       8192",
        "1     parked as parked-1                     60      4096",
        "12    parked as parked-2, its request waits  60      4096",
    ]
    assert view.data() == {"slots": listed}


def test_a_page_receipt_says_what_will_be_reused_where_a_page_went_in() -> None:
    said = {"id_slot": 1, "page": "fox", "n_tokens": 1, "n_bytes": 2048, "n_checkpoints": 1}
    out = PageView("out of slot 1", PageReceipt.model_validate(said | {"ms": 3.25}))
    assert rows_of(out.text()) == {
        "page": "fox, out of slot 1",
        "held": "1 token, 2.0 KiB, 1 checkpoint",
        "took": "3.2 ms",
    }
    back = PageView("into slot 0", PageReceipt.model_validate(said | {"n_reusable": 0}))
    assert rows_of(back.text())["reusable"] == "0 tokens"


def test_a_receipt_of_files_says_only_what_its_verb_does() -> None:
    said: dict[str, Any] = {"id_slot": 0, "filename": "b", "n_tokens": 33, "n_bytes": 761464}
    written = said | {"n_checkpoints": 1, "n_written": 762016}
    spilled = written | {"page": "fox", "dropped": True, "ms": 4.6, "something_newer": 1}
    view = FileView("of page fox", FileReceipt.model_validate(spilled))
    assert rows_of(view.text()) == {
        "file": "b, of page fox",
        "page": "dropped",
        "held": "33 tokens, 743.6 KiB, 1 checkpoint",
        "written": "744.2 KiB",
        "took": "4.6 ms",
    }
    assert view.data() == spilled
    kept = FileReceipt.model_validate(spilled | {"dropped": False})
    assert rows_of(FileView("of page fox", kept).text())["page"] == "not dropped"
    saved = FileReceipt.model_validate(written | {"timings": {"save_ms": 2.0}})
    rows = rows_of(FileView("of slot 0", saved).text())
    assert (list(rows), rows["took"]) == (["file", "held", "written", "took"], "2.0 ms")
    restored = said | {"n_read": 762016, "n_reusable": 0, "lost": []}
    restored |= {"n_checkpoints": 0, "timings": {"restore_ms": 5.25}}
    view = FileView("into slot 0", FileReceipt.model_validate(restored))
    assert rows_of(view.text()) == {
        "file": "b, into slot 0",
        "held": "33 tokens, 743.6 KiB, 0 checkpoints",
        "read": "744.2 KiB",
        "reusable": "0 tokens",
        "took": "5.2 ms",
    }
    assert view.data() == restored


def test_phases_are_sorted_and_those_of_no_length_left_out() -> None:
    phases = {"swap": 0.04, "page_out": 0.2, "page_in": 1.0}
    assert text.phases(phases) == "page in 1.0, page out 0.2"
    assert text.phases({}) == ""


def test_a_lifecycle_result_is_one_line() -> None:
    result = LifecycleResult.model_validate({"outcome": "started", "pid": 7, "load_s": 0.55})
    assert LifecycleView(result).text() == "engine started, pid 7, loaded in 0.6 s"


def test_a_log_line_of_any_shape_has_three_parts() -> None:
    parts = LogLine("2026-10-02T12:00:00.000Z stderr a  b ").data()
    assert parts == {"at": "2026-10-02T12:00:00.000Z", "stream": "stderr", "text": "a  b "}
    assert LogLine("").data() == {"at": "", "stream": "", "text": ""}


def test_a_socket_that_goes_at_logout_is_known(tmp_path: Path) -> None:
    def paths(runtime: str) -> Paths:
        return Paths(tmp_path, tmp_path, Path(runtime))

    user = pwd.getpwuid(os.getuid()).pw_name
    session = f"/run/user/{os.getuid()}/llamactl"
    assert ends_at_logout(paths(session), tmp_path) == user
    assert ends_at_logout(paths("/srv/llamactl"), tmp_path) is None
    (tmp_path / user).touch()
    assert ends_at_logout(paths(session), tmp_path) is None


def status_of(**change: Any) -> Status:
    daemon = {"pid": 9, "version": "0.1.0", "started_at": NOON}
    nothing = {
        "state": "stopped", "intent": "down", "generation": 0, "crashes": 0, "retry_in_s": None,
        "daemon": daemon | {"control_socket": "/r/control.sock", "log_dir": "/s/logs"},
        "desired": None, "override": None, "engine": None, "operation": None, "problem": None,
        "last_exit": None, "strangers": [], "weight_loads": 0, "loads_avoided": 0,
    }  # fmt: skip
    return Status.model_validate(nothing | change)


def test_a_daemon_without_an_engine_has_a_short_status() -> None:
    view = StatusView(status_of(), None)
    assert rows_of(view.text()) == {
        "engine": "stopped",
        "ledger": "0 weight loads, 0 avoided by reconfiguring",
        "daemon": "pid 9, version 0.1.0",
    }
    assert view.data()["drift"] == {}
    assert view.data()["uptime_s"] is None


def test_what_differs_is_told_in_words_of_toml() -> None:
    spec = {"model": "/m.gguf", "n_ctx": 8192, "n_seq": 2}
    status = status_of(
        desired={"spec": spec, "engine_path": "/e"},
        override={"n_ctx": 8192, "n_seq": 2, "kv_unified": True, "by": "me", "at": NOON},
        unapplied=[{"field": "engine.kv_unified", "before": None, "after": False}],
    )
    rows = rows_of(StatusView(status, None).text())
    assert rows["drift"].startswith("kv_unified is true, asked: absent (set live ")
    assert rows["unapplied"] == "engine.kv_unified is absent, not false"


def test_a_log_that_lacks_something_says_so() -> None:
    engine = {
        "pid": 7,
        "holder_pid": 8,
        "instance_id": "a",
        "url": "http://h:1",
        "socket": "/s",
        "adopted": False,
        "log_dropped_bytes": 4096,
    }
    rows = rows_of(StatusView(status_of(engine=engine), None).text())
    assert rows["log"] == "4.0 KiB are missing in it: no disk took them"
    whole = engine | {"log_dropped_bytes": 0}
    assert "log" not in rows_of(StatusView(status_of(engine=whole), None).text())


def test_what_no_disk_took_is_shown() -> None:
    full = {"code": "state_unwritable", "message": "/s/state.json cannot be written: no space"}
    rows = rows_of(StatusView(status_of(unsaved=full, ledger_lost=2), None).text())
    assert rows["unsaved"] == full["message"]
    assert rows["lost"] == "of the ledger 2 lines since the daemon began: no disk took them"
    assert LedgerView(Ledger(lines=(), totals=Totals(), lost=2)).text() == (
        "no lines; lost 2 lines since the daemon began"
    )
    damaged = LedgerView(Ledger(lines=(), totals=Totals(), unreadable=2))
    assert damaged.text() == "no lines, 2 lines of the file that make no sense"
    assert damaged.data()["unreadable"] == 2


def test_a_crash_shows_the_reason_the_retry_and_the_last_exit() -> None:
    status = status_of(
        state="crashed",
        crashes=2,
        retry_in_s=3.25,
        problem={"code": "engine_exited", "message": "the engine died"},
        last_exit={"summary": "was ended by signal 9 (SIGKILL)", "at": NOON, "signal": 9},
        crash_record="/s/crashes/a-2.json",
        dropped_override={"n_ctx": 131072, "n_seq": 4, "kv_unified": None, "by": "me", "at": NOON},
    )
    rows = rows_of(StatusView(status, None).text())
    assert rows["engine"] == "crashed, retry in 3.2 s, 2 failures in a row"
    assert rows["problem"] == "the engine died"
    assert rows["last exit"].startswith("was ended by signal 9 (SIGKILL), 2026-10-02 ")
    assert rows["crash record"] == "/s/crashes/a-2.json"
    assert rows["its memory"] == "conversations that it held in no file are lost"
    again = status.model_copy(update={"state": "ready", "retry_in_s": None, "forgotten_in_s": 170})
    engine = rows_of(StatusView(again, None).text())["engine"]
    assert engine == "ready, after 2 failures in a row, forgotten in 2 min 50 s"
    assert rows["dropped"].startswith("n_ctx 131072, n_seq 4, set live 2026-10-02 ")


def test_an_operation_and_a_stranger_are_shown() -> None:
    operation = {
        "id": "1", "kind": "reconfigure", "state": "running", "progress": "the engine is busy",
        "requested_by": "uid 0", "requested_at": NOON,
    }  # fmt: skip
    stranger = {"pid": 77, "instance_id": "x"}
    status = status_of(state="reconfiguring", operation=operation, strangers=[stranger])
    rows = rows_of(StatusView(status, None).text())
    assert rows["doing"] == "reconfigure the engine is busy"
    assert rows["stranger"].startswith("pid 77: cannot be proven ours")


def test_what_was_carried_is_told_by_name_where_it_is_not_in_its_place() -> None:
    left = {"what": "slot 0", "n_tokens": 400, "fate": "left", "file": "carry-1", "n_bytes": 1024}
    left |= {"place": "carry-1", "reason": "the window is too\nsmall"}
    back = {
        "what": "page fox",
        "n_tokens": 1,
        "fate": "back",
        "place": "page fox",
        "file": "carry-2",
    }
    lost = {
        "what": "slot 1",
        "n_tokens": 9,
        "fate": "lost",
        "file": "carry-3",
        "reason": "no space",
    }
    moved = back | {"what": "slot 3", "n_tokens": 44, "place": "page carried-1"}
    short = back | {"what": "slot 2", "place": "slot 0", "reason": "without f.mtp: it is missing"}
    kept = back | {"what": "slot 4", "place": "carry-2", "fate": "written"}
    report = CarryReport.model_validate(
        {"conversations": [left, back, lost, moved, short, kept], "took_s": 2.5, "n_cut": 1}
    )
    result = LifecycleResult(outcome=LifecycleOutcome.STARTED, pid=7, load_s=1.5, carried=report)
    assert LifecycleView(result).text().splitlines() == [
        "engine started, pid 7, loaded in 1.5 s",
        "conversations: 3 brought back, 1 kept in files, 1 left in files, 1 lost "
        "(456 tokens, 1.0 KiB in 2.5 s, 1 request cut)",
        "  left in carry-1: slot 0 (400 tokens): the window is too\\nsmall",
        "  lost: slot 1 (9 tokens): no space",
        "  slot 3 -> page carried-1 (44 tokens)",
        "  slot 2 -> slot 0 (1 token): without f.mtp: it is missing",
    ]
    before = CarryReport(problem=Problem(code="not_supported", message="does not know /quiesce"))
    result = LifecycleResult(outcome=LifecycleOutcome.STOPPED, carried=before)
    assert LifecycleView(result).text().splitlines() == [
        "engine stopped",
        "conversations: does not know /quiesce",
    ]


def test_what_is_left_in_files_is_listed_with_its_reason_and_counted() -> None:
    left = CarriedConversation(
        what="slot 0",
        n_tokens=50,
        fate=CarryFate.LEFT,
        reason="it is of another model, /m.gguf",
        n_bytes=2**20,
        file="carry-1",
    )
    heads, row = PagesView(Pages(pages=(), left=(left,))).text().splitlines()[-2:]
    assert heads.split() == ["left", "in", "files", "was", "tokens", "bytes", "reason"]
    assert row.split()[:5] == ["carry-1", "slot", "0", "50", "1.0"]
    assert row.endswith("it is of another model, /m.gguf")
    status = status_of(in_files=3, in_files_bytes=2**20)
    assert rows_of(StatusView(status, None).text())["in files"].startswith("3 conversations, 1.0")
