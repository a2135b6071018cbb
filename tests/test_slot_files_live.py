"""Slots and pages of the real engine in files: what comes back, and what damage costs."""

from __future__ import annotations

import contextlib
import shutil
import stat
import struct
from typing import TYPE_CHECKING, Any

import pytest
from live_engine import Answer, LiveEngine, live_engine
from page_conversations import refused
from sandbox import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tiny_models import TinyModels

    Start = Callable[..., AbstractContextManager[LiveEngine]]

ASK = {"temperature": 0, "n_predict": 16, "ignore_eos": True}
PROMPT = list(range(10, 110))
CHECKPOINTS = ("--ubatch-size", "32", "--checkpoint-min-step", "16")
MTP = ("--spec-type", "draft-mtp")
LORA = ("--lora", "tiny:llama-lora")
MAGIC = b"\x89llpage\n"


@pytest.fixture
def start(engine_path: Path, tiny: TinyModels, tmp_path: Path) -> Start:
    """Start an engine on a tiny model; all of one test use the same directory for files."""

    @contextlib.contextmanager
    def start(name: str, *options: str) -> Iterator[LiveEngine]:
        wide = f"{name.split('-')[0]}.context_length=int:65536"
        words = (*tiny.options(options), "--override-kv", wide, "--cache-ram", "0", "--metrics")
        directory = ("--slot-save-path", str(tmp_path / "slots"))
        (tmp_path / "slots").mkdir(exist_ok=True)
        with live_engine(engine_path, tiny.model(name), *words, *directory) as live:
            live.slot_files = tmp_path / "slots"
            yield live

    return start


def hold(live: LiveEngine, slot: int = 1, **body: Any) -> list[int]:
    """Have a slot hold a conversation; return its tokens."""
    answer = live.ask("/completion", **ASK, prompt=PROMPT, id_slot=slot, n_probs=1, **body).receipt
    return [*PROMPT, *(each["id"] for each in answer["completion_probabilities"])]


def go_on(live: LiveEngine, slot: int, said: list[int], **body: Any) -> tuple[int, Any]:
    """Go on with a conversation; return the tokens that were reused and what was written."""
    answer = live.ask(
        "/completion", **ASK, prompt=[*said, 21, 22], id_slot=slot, n_probs=1, **body
    ).receipt
    written = [(each["id"], each["logprob"]) for each in answer["completion_probabilities"]]
    return answer["timings"]["cache_n"], written


def names(live: LiveEngine) -> list[str]:
    return sorted(path.name for path in live.slot_files.iterdir() if path.name != ".page-lock")


# What is written


def test_a_file_has_the_sidecars_that_its_slot_needs(start: Start) -> None:
    with start("llama-dense") as live:
        hold(live)
        saved = live.file(1, "save", "plain").receipt
        assert names(live) == ["plain", "plain.ckpt"]
        sizes = [(live.slot_files / name).stat().st_size for name in names(live)]
        assert saved["n_written"] == sum(sizes)
        assert live.slots()[1]["n_prompt_tokens"] == saved["n_saved"] == len(PROMPT) + 15
        for path in live.slot_files.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (live.slot_files / "plain.ckpt").read_bytes().startswith(MAGIC)
    with start("llama-dense", *LORA) as live:
        hold(live)
        live.file(1, "save", "adapted")
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        hold(live)
        saved = live.file(1, "save", "drafted").receipt
        assert saved["n_checkpoints"] > 0
        assert saved["n_bytes_spec"] > 0
        suffixes = {"plain": [".ckpt"], "adapted": [".ckpt", ".lora"], "drafted": [".ckpt", ".dft"]}
        files = sorted(n + s for n, more in suffixes.items() for s in ("", *more))
        assert names(live) == files


def test_a_save_with_fewer_sidecars_leaves_none_of_the_last_one(start: Start) -> None:
    with start("llama-dense", *LORA) as live:
        hold(live)
        live.file(1, "save", "a")
        assert names(live) == ["a", "a.ckpt", "a.lora"]
        hold(live, lora=[{"id": 0, "scale": 0}])
        live.file(1, "save", "a")
        assert names(live) == ["a", "a.ckpt"]


def test_a_spilled_page_is_as_good_as_the_page(start: Start) -> None:
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        out = live.page(1, "page_out", "fox").receipt
        spilled = live.spill("fox").receipt
        assert (spilled["filename"], spilled["dropped"]) == ("fox", False)
        assert [page["name"] for page in live.pages()] == ["fox"]
        assert live.spill("fox", filename="other", drop=True).receipt["dropped"]
        assert live.pages() == []
        assert live.metric("page_spill_total") == 2
        assert live.metric("page_store_bytes") == 0
        for name in ("fox", "other"):
            back = live.file(0, "restore", name).receipt
            assert (back["n_bytes"], back["lost"]) == (out["n_bytes"], [])
            assert back["n_read"] == spilled["n_written"]
            assert go_on(live, 0, said) == control
            assert control[0] == back["n_reusable"] > 0


def test_a_parked_request_can_be_spilled_but_not_dropped(start: Start) -> None:
    with start("llama-dense") as live:
        hold(live)
        live.reconfigure(n_seq=1)
        (page,) = live.pages()
        assert live.spill(page["name"], filename="kept", drop=True).receipt["dropped"]
        assert (live.pages(), live.props()["parked"]) == ([], [])


# What is read


def test_files_outlive_the_engine(start: Start) -> None:
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        live.file(1, "save", "a")
    with start("qwen35-mtp", *MTP, *CHECKPOINTS, "--ctx-size", "8192", "--parallel", "3") as live:
        back = live.file(2, "restore", "a").receipt
        assert go_on(live, 2, said) == control
        assert control[0] == back["n_reusable"]


def test_a_state_of_another_model_cache_or_draft_is_refused(start: Start) -> None:
    with start("llama-dense") as live:
        hold(live)
        live.file(1, "save", "a")
        live.reconfigure(cache_type_v="q8_0", force=True)
        error = refused(live.file(0, "restore", "a"), 409, "page_mismatch")
        assert [field["field"] for field in error["details"]["fields"]] == ["cache_type_v"]
    with start("llama-draft") as live:  # of the same shape, with other weights
        held = hold(live)
        error = refused(live.file(1, "restore", "a"), 409, "page_mismatch")
        (field,) = error["details"]["fields"]
        assert field["field"] == "model"
        assert field["page"] != field["server"]
        assert live.slots()[1]["n_prompt_tokens"] == len(held) - 1
    drafts = ("--spec-type", "draft-simple", "--model-draft", "tiny:llama-draft")
    with start("llama-dense", *drafts) as live:
        error = refused(live.file(0, "restore", "a"), 409, "page_mismatch")
        assert [field["field"] for field in error["details"]["fields"]] == ["draft"]


def test_the_model_is_told_by_its_content_not_by_its_path(
    engine_path: Path, tiny: TinyModels, tmp_path: Path
) -> None:
    options = ("--slot-save-path", str(tmp_path), "--override-kv", "llama.context_length=int:65536")
    with live_engine(engine_path, tiny.model("llama-dense"), *options) as live:
        said = hold(live)
        live.file(1, "save", "a")
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(tiny.model("llama-dense").read_bytes())
    with live_engine(engine_path, moved, *options) as live:
        assert live.file(0, "restore", "a").status == 200
        assert go_on(live, 0, said)[0] == len(said) - 1


def test_adapters_come_back_with_their_scale(start: Start) -> None:
    half: dict[str, Any] = {"lora": [{"id": 0, "scale": 0.5}]}
    with start("llama-dense", *LORA) as live:
        said = hold(live, **half)
        control = go_on(live, 1, said, **half)
        live.erase()
        hold(live, **half)
        live.file(1, "save", "a")
    with start("llama-dense", *LORA) as live:
        assert live.file(0, "restore", "a").receipt["n_reusable"] == len(said) - 1
        assert go_on(live, 0, said, **half) == control
        # a request with another scale finds nothing that it could use
        live.file(0, "restore", "a")
        assert go_on(live, 0, said, lora=[{"id": 0, "scale": 0.25}])[0] == 0
    with start("llama-dense") as live:
        error = refused(live.file(0, "restore", "a"), 409, "page_mismatch")
        (field,) = error["details"]["fields"]
        assert (field["field"], field["server"]) == ("adapter", "")


# What is damaged

DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "foreign": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(500)),
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "corrupt": lambda path: flip(path, 60),
}
"""Other programs use the suffix .ckpt too: archives, for one."""


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def write_version(path: Path, version: int) -> None:
    """Make a file one of another version, of which the header has another checksum."""
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 12, version)
    flipped = 20 + 20 * struct.unpack_from("<I", content, 16)[0]
    content[flipped] ^= 1
    path.write_bytes(content)


COSTS_A_PART = [
    *((".dft", damage) for damage in DAMAGE),
    *((".ckpt", damage) for damage in ("missing", "foreign")),
]


@pytest.mark.parametrize(("suffix", "damage"), COSTS_A_PART)
def test_a_damaged_sidecar_costs_its_part(start: Start, suffix: str, damage: str) -> None:
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        saved = live.file(1, "save", "a").receipt
        DAMAGE[damage](live.slot_files / f"a{suffix}")
        back = live.file(0, "restore", "a").receipt
        # only a good .ckpt says that the draft belongs to the state
        lost = ["a.ckpt", "a.dft"] if suffix == ".ckpt" else ["a.dft"]
        assert [each["file"] for each in back["lost"]] == lost
        assert all(each["why"] for each in back["lost"])
        until(lambda: f"without a{suffix}" in live.log())
        n_reused, written = go_on(live, 0, said)
        assert n_reused == back["n_reusable"]
        assert [token for token, _ in written] == [token for token, _ in control[1]]
        if suffix == ".dft":
            assert back["n_checkpoints"] == saved["n_checkpoints"]
            assert n_reused == control[0]
            assert back["n_bytes_draft"] == 0
        else:
            assert back["n_checkpoints"] == 0


UNVOUCHED: dict[str, Callable[[Path], object]] = {
    **{damage: DAMAGE[damage] for damage in ("empty", "torn", "corrupt")},
    "first byte": lambda path: flip(path, 0),
    "kind": lambda path: flip(path, 8),
    "version damaged": lambda path: flip(path, 12),
    "version": lambda path: write_version(path, 2),
}


@pytest.mark.parametrize("damage", UNVOUCHED)
def test_a_state_that_nothing_vouches_for_is_refused(start: Start, damage: str) -> None:
    """It might be another model's, and would be loaded: until who knows better says so."""
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        live.file(1, "save", "a")
        control = go_on(live, 1, said)
        UNVOUCHED[damage](live.slot_files / "a.ckpt")
        live.erase()
        hold(live)
        message = refused(live.file(1, "restore", "a"), 400, "bad_file")["message"]
        what = "was written by another version" if damage == "version" else "is damaged"
        assert f"'a' is vouched for by nothing: 'a.ckpt' {what} (" in message
        assert "remove 'a.ckpt' or move 'a' alone elsewhere" in message
        assert go_on(live, 1, said) == control, "the slot has what it had"

        (live.slot_files / "a.ckpt").unlink()
        lost = live.file(0, "restore", "a").receipt["lost"]
        assert [each["file"] for each in lost] == ["a.ckpt", "a.dft"]
        live.file(1, "save", "a")
        assert live.file(0, "restore", "a").receipt["lost"] == []


@pytest.mark.parametrize("damage", ["empty", "torn", "corrupt", "first byte", "version"])
def test_a_save_replaces_what_is_damaged(start: Start, damage: str) -> None:
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        live.file(1, "save", "a")
        for suffix in ("", ".ckpt", ".dft"):
            UNVOUCHED[damage](live.slot_files / f"a{suffix}")
            assert live.file(1, "save", "a").status == 200
            assert live.file(0, "restore", "a").receipt["lost"] == []
        assert go_on(live, 0, said) == go_on(live, 1, said)


def test_one_damaged_checkpoint_is_lost_alone(start: Start) -> None:
    with start("qwen35-dense", *CHECKPOINTS) as live:
        said = hold(live)
        saved = live.file(1, "save", "a").receipt
        assert saved["n_checkpoints"] > 1
        path = live.slot_files / "a.ckpt"
        flip(path, path.stat().st_size - 1)
        back = live.file(0, "restore", "a").receipt
        assert back["n_checkpoints"] == saved["n_checkpoints"] - 1
        assert back["lost"] == [{"file": "a.ckpt", "why": "1 checkpoints are damaged"}]
        assert go_on(live, 0, said)[0] == back["n_reusable"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_its_adapters_a_state_is_good_for_nothing(start: Start, damage: str) -> None:
    with start("llama-dense", *LORA) as live:
        hold(live)
        live.file(1, "save", "a")
        DAMAGE[damage](live.slot_files / "a.lora")
        kept = live.slots()[1]["n_prompt_tokens"]
        error = refused(live.file(1, "restore", "a"), 400, "bad_file")
        assert "a.lora" in error["message"]
        assert live.slots()[1]["n_prompt_tokens"] == kept


@pytest.mark.parametrize("where", [0, 5, 40, 700, -1])
def test_a_damaged_state_is_refused_and_the_slot_keeps_its_own(start: Start, where: int) -> None:
    with start("qwen35-mtp", *MTP, *CHECKPOINTS) as live:
        said = hold(live)
        live.file(1, "save", "a")
        control = go_on(live, 1, said)
        flip(live.slot_files / "a", where)
        live.erase()
        hold(live)
        refused(live.file(1, "restore", "a"), 400, "bad_file")
        assert go_on(live, 1, said) == control


def test_a_cell_at_no_position_is_refused_and_poisons_nothing(start: Start) -> None:
    """No checksum tells of the damage, and a cell before the first position is never removed."""
    with start("llama-dense") as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        live.file(1, "save", "a")
        (live.slot_files / "a.ckpt").unlink()
        content = bytearray((live.slot_files / "a").read_bytes())
        n_words = struct.unpack_from("<I", content, 8)[0]
        # after the tokens: streams, and for each its cells: position, sequences, sequence
        first = content.index(struct.pack("<iI", 5, 1), 12 + 4 * n_words)
        struct.pack_into("<i", content, first, -5)
        (live.slot_files / "a").write_bytes(content)
        refused(live.file(0, "restore", "a"), 400, "bad_file")
        live.erase()
        hold(live, 0)
        assert go_on(live, 0, said) == control


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-dense", ("--flash-attn", "off")), ("qwen35-dense", CHECKPOINTS)],
    ids=["attention", "recurrent"],
)
def test_a_value_that_is_no_number_is_refused_and_poisons_nothing(
    start: Start, name: str, options: tuple[str, ...]
) -> None:
    """A NaN in the cache is neither masked nor cleared: other conversations would see it."""
    with start(name, *options) as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        live.file(1, "save", "a")
        (live.slot_files / "a.ckpt").unlink()
        content = (live.slot_files / "a").read_bytes()
        (live.slot_files / "a").write_bytes(content[:-4] + b"\xff" * 4)
        refused(live.file(0, "restore", "a"), 400, "bad_file")
        live.erase()
        hold(live, 0)
        assert go_on(live, 0, said) == control


def test_a_ceiling_of_one_page_lets_it_be_saved_and_restored(start: Start) -> None:
    with start("qwen35-dense", *CHECKPOINTS) as live:
        hold(live)
        one = live.page(1, "page_out", "a").receipt["n_bytes"]
    with start("qwen35-dense", *CHECKPOINTS, "--page-ram-bytes", str(one)) as live:
        said = hold(live)
        assert live.file(1, "save", "a").status == 200
        for slot in (1, 0):  # in place of what it holds, and into an empty one
            assert live.file(slot, "restore", "a").receipt["n_restored"] == len(said) - 1
        assert live.metric("page_store_bytes") == 0
        assert go_on(live, 0, said) == go_on(live, 1, said)
    with start("qwen35-dense", *CHECKPOINTS, "--page-ram-bytes", "1000") as live:
        assert live.file(0, "restore", "a").status == 200
        error = refused(live.file(0, "restore", "a"), 503, "page_ceiling")
        assert "erase" in error["message"]


FOREIGN = {
    "archive": b"PK\x03\x04 weights of somebody",
    "one byte": b"x",
    "seven bytes": b"\x89llpagE",
    "eight bytes": b"\x89llpage\r",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("suffix", ["", ".ckpt", ".lora", ".dft"])
def test_another_programs_file_is_not_replaced(
    shared: LiveEngine, suffix: str, content: bytes
) -> None:
    theirs = shared.slot_files / f"model{suffix}"
    theirs.write_bytes(content)
    before = names(shared)
    answers = shared.file(0, "save", "model"), shared.spill("kept", filename="model")
    for answer in answers:
        error = refused(answer, 500, "files_failed")
        assert f"{theirs} is another program's" in error["message"]
    assert (names(shared), theirs.read_bytes()) == (before, content)
    theirs.unlink()
    assert shared.spill("kept", filename="model").status == 200
    for path in shared.slot_files.glob("model*"):
        path.unlink()


@pytest.mark.parametrize("suffix", [".lora", ".dft"])
def test_another_programs_sidecar_is_not_read(start: Start, suffix: str) -> None:
    with start("llama-dense") as live:
        said = hold(live)
        written = live.file(1, "save", "a").receipt["n_written"]
        with (live.slot_files / f"a{suffix}").open("wb") as file:
            file.write(b"PK")
            file.truncate(2**34)
        back = live.file(0, "restore", "a").receipt
        assert (back["n_read"], back["lost"]) == (written, [])
        assert go_on(live, 0, said) == go_on(live, 1, said)


@pytest.mark.parametrize("suffix", ["", ".ckpt", ".lora", ".dft"])
def test_what_is_nobodys_is_replaced(shared: LiveEngine, suffix: str) -> None:
    """An empty file has no owner; the begin of one of ours has been cut off."""
    for content in (b"", MAGIC[:3]) if suffix else (b"", struct.pack("<I", 0x67677371)):
        (shared.slot_files / f"model{suffix}").write_bytes(content)
        assert shared.spill("kept", filename="model").status == 200
        assert shared.file(1, "restore", "model").receipt["lost"] == []
        for path in shared.slot_files.glob("model*"):
            path.unlink()


def test_a_state_with_a_damaged_head_is_replaced_where_sidecars_say_whose_it_is(
    shared: LiveEngine,
) -> None:
    assert shared.spill("kept", filename="a").status == 200
    flip(shared.slot_files / "a", 0)
    ckpt = (shared.slot_files / "a.ckpt").read_bytes()
    (shared.slot_files / "a.ckpt").unlink()
    error = refused(shared.spill("kept", filename="a"), 500, "files_failed")
    assert f"{shared.slot_files / 'a'} is another program's" in error["message"]
    (shared.slot_files / "a.ckpt").write_bytes(bytes(16) + ckpt[16:])
    assert shared.spill("kept", filename="a").status == 200
    assert (shared.slot_files / "a.ckpt").read_bytes() == ckpt
    assert shared.file(1, "restore", "a").receipt["lost"] == []


def test_a_state_that_was_cut_off_is_refused(start: Start) -> None:
    with start("llama-dense") as live:
        said = hold(live)
        live.file(1, "save", "a")
        content = (live.slot_files / "a").read_bytes()
        for size in (0, 1, 11, 12, 400, len(content) // 2, len(content) - 1):
            (live.slot_files / "a").write_bytes(content[:size])
            refused(live.file(1, "restore", "a"), 400, "bad_file")
            assert go_on(live, 1, said)[0] > len(PROMPT), "the slot has what it had"


def test_a_file_that_no_memory_holds_is_refused_before_it_is_read(start: Start) -> None:
    with start("llama-dense") as live:
        said = hold(live)
        with (live.slot_files / "a").open("wb") as file:
            file.truncate(1 << 42)
        error = refused(live.file(1, "restore", "a"), 503, "insufficient_memory")
        assert error["details"] == {"bytes_needed": 1 << 42}
        assert go_on(live, 1, said)[0] > len(PROMPT)


def test_a_file_without_sidecars_is_taken_as_it_always_was(start: Start) -> None:
    with start("llama-dense") as live:
        said = hold(live)
        control = go_on(live, 1, said)
        live.erase()
        hold(live)
        live.file(1, "save", "a")
        (live.slot_files / "a.ckpt").unlink()
        back = live.file(0, "restore", "a").receipt
        assert back["lost"] == [{"file": "a.ckpt", "why": "it is missing"}]
        assert go_on(live, 0, said) == control


def test_a_state_that_another_program_wrote_since_is_taken_without_its_sidecar(
    start: Start,
) -> None:
    with start("llama-dense") as live:
        hold(live)
        live.file(1, "save", "a")
        live.ask("/completion", **ASK, prompt=PROMPT[:50], id_slot=1)
        live.file(1, "save", "b")
        written, there = ((live.slot_files / name).stat().st_size for name in ("a", "b"))
        (live.slot_files / "a").write_bytes((live.slot_files / "b").read_bytes())
        back = live.file(0, "restore", "a").receipt
        (lost,) = back["lost"]
        assert lost["file"] == "a.ckpt"
        assert f"written with {written} bytes of 'a', which has {there}" in lost["why"]
        assert back["n_restored"] == 50 + 15


# What is asked


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".x", "x.ckpt", "X.CKPT", "x.lora"),
        *("x.dft", "x.page-staging", ".page-lock", "a" * 300, "a\x00b", "a\nb", "x.", " x", "a:b"),
    ],
)
def test_a_file_name_that_is_none_is_refused(shared: LiveEngine, name: str) -> None:
    before = sorted(shared.root.rglob("*"))
    for action in ("save", "restore"):
        refused(shared.file(0, action, name), 400, "bad_name")
    refused(shared.spill("kept", filename=name), 400, "bad_name")
    assert sorted(shared.root.rglob("*")) == before


@pytest.mark.parametrize("body", ["", "x", "[]", "{}", '{"filename": 1}', '{"filename": null}'])
def test_a_body_that_is_none_is_refused(shared: LiveEngine, body: str) -> None:
    for action in ("save", "restore"):
        answer = shared.tcp.post(f"/slots/0?action={action}", content=body)
        refused(Answer(answer.status_code, answer.json()), 400, "bad_body")


def test_a_spill_of_what_is_not_there_is_refused(shared: LiveEngine) -> None:
    refused(shared.spill("none"), 404, "unknown_page")
    refused(shared.spill("kept", drop="yes"), 400, "bad_body")
    refused(shared.file(0, "restore", "none"), 400, "no_file")
    refused(shared.file(7, "restore", "none"), 400, "bad_slot")
    assert shared.spill("kept").status == 200
    refused(shared.file(7, "restore", "kept"), 400, "bad_slot")


def test_a_directory_that_is_gone_costs_nothing(start: Start) -> None:
    with start("llama-dense") as live:
        said = hold(live)
        live.page(1, "page_out", "fox")
        hold(live, 0)
        shutil.rmtree(live.slot_files)
        refused(live.spill("fox", drop=True), 500, "files_failed")
        refused(live.file(0, "save", "a"), 500, "files_failed")
        refused(live.file(0, "restore", "a"), 400, "no_file")
        assert [page["name"] for page in live.pages()] == ["fox"]
        assert live.metric("page_failed_total") == 2
        live.slot_files.mkdir()
        assert live.spill("fox", drop=True).receipt["dropped"]
        live.file(1, "restore", "fox")
        assert go_on(live, 1, said)[0] == go_on(live, 0, said)[0] == len(said) - 1


@pytest.fixture(scope="module")
def shared(engine_path: Path, model_path: Path) -> Iterator[LiveEngine]:
    """An engine that has a page `kept`."""
    with live_engine(engine_path, model_path) as live:
        live.ask("/completion", **ASK, prompt="Once upon a time", id_slot=0)
        assert live.page(0, "page_out", "kept").status == 200
        yield live
