"""Damaged, absurd and exchanged files of pages, many of them: each costs at most its own page."""

from __future__ import annotations

import dataclasses
import random
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import native_programs
import psutil
import pytest
from live_engine import LiveEngine, live_engine, resident
from llamactl_validate.streams import Stream, Streams, streams

if TYPE_CHECKING:
    from pathlib import Path

    from tiny_models import TinyModels

Files = dict[str, bytes]
"""The files of one page, by suffix."""

KINDS = {
    "qwen35-mtp": (
        *("--spec-type", "draft-mtp"),
        *("--ubatch-size", "32", "--checkpoint-min-step", "16"),
    ),
    "llama-dense": ("--lora", "tiny:llama-lora"),
}
N_MUTATIONS, N_SETTLED = 500, 150
N_BYTES_GROWN_MOST = 3 * 2**20
"""The heap grows by a megabyte at a time; a page that leaks with each restore is ten times that."""
SEED = 7
ASK: dict[str, Any] = {"temperature": 0, "n_predict": 2, "ignore_eos": True}
STREAM = {"temperature": 0, "n_predict": 300, "ignore_eos": True, "cache_prompt": False}
KEPT = list(range(10, 60))
PROMPTS = {"a": list(range(10, 110)), "b": list(range(20, 60))}
REASONS = {"bad_file", "page_mismatch", "no_file"}
SUFFIXES = ("", ".ckpt", ".lora", ".dft")
EXTREMES = (0, 1, 0x7F, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 2**64 - 20)
N_BYTES_HEAD = 400
"""Most of what is counted or measured is at the begin of a file."""


CELL_POSITION = 108
"""Where a .dft of this model has the position of a cell: behind its header and one more cell."""


@dataclasses.dataclass
class Hostile:
    """What a seed makes of the files of two pages."""

    pages: dict[str, Files]
    random: random.Random

    def made(self) -> tuple[str, Files, bool]:
        """Return what was done, the files, and whether their checksums are to be right."""
        files = dict(self.pages["a"])
        does = self.random.choice((self.flipped, self.cut, self.absurd, self.absurd, self.spliced))
        what = does(files)
        return what, files, self.random.random() < 0.6

    def place(self, content: bytes | bytearray) -> int:
        at_most = N_BYTES_HEAD if self.random.random() < 0.7 else len(content)
        return self.random.randrange(min(at_most, len(content)))

    def flipped(self, files: Files) -> str:
        suffix = self.random.choice(sorted(files))
        content = bytearray(files[suffix])
        for _ in range(self.random.randint(1, 8)):
            content[self.place(content)] ^= 1 << self.random.randrange(8)
        files[suffix] = bytes(content)
        return f"flipped {suffix}"

    def cut(self, files: Files) -> str:
        suffix = self.random.choice(sorted(files))
        files[suffix] = files[suffix][: self.place(files[suffix])]
        return f"cut {suffix} to {len(files[suffix])}"

    def absurd(self, files: Files) -> str:
        suffix = self.random.choice(sorted(files))
        content, width = files[suffix], self.random.choice((4, 8))
        at, value = self.place(content) & ~3, self.random.choice(EXTREMES)
        number = (value % 2 ** (8 * width)).to_bytes(width, "little")
        files[suffix] = content[:at] + number + content[at + width :]
        return f"{value} at {at} of {suffix}"

    def spliced(self, files: Files) -> str:
        origin = {suffix: self.random.choice(("a", "b", "none")) for suffix in files}
        origin[""] = self.random.choice(("a", "b"))
        files.clear()
        for suffix, name in origin.items():
            if suffix in self.pages.get(name, {}):
                files[suffix] = self.pages[name][suffix]
        return f"spliced {origin}"


class Sweep:
    """An engine whose slot 0 is restored to, while slot 1 writes."""

    def __init__(self, live: LiveEngine, sealer: Path, started: Streams) -> None:
        self.live = live
        self.n_taken = self.n_refused = self.n_streams = 0
        self._sealer = sealer
        self._started = started
        self._control = self.stream().text
        self._said = self.hold("b")["tokens"]
        """Slot 0 holds this conversation before each restore."""

    def stream(self) -> Stream:
        return self._started.start(**STREAM, prompt=KEPT, id_slot=1)

    def finish(self, stream: Stream) -> None:
        assert stream.text == self._control
        self.n_streams += 1

    def save(self, name: str) -> Files:
        self.hold(name)
        assert self.live.file(0, "save", name).status == 200
        paths = {suffix: self.live.slot_files / f"{name}{suffix}" for suffix in SUFFIXES}
        return {suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()}

    def hold(self, name: str) -> Any:
        """Have slot 0 hold a conversation; return the end of the answer."""
        asked = {**ASK, "prompt": PROMPTS[name], "id_slot": 0, "return_tokens": True}
        answer = self.live.ask("/completion", **asked).receipt
        assert answer["stop"]
        return answer

    def restore(self, files: Files, *, sealed: bool) -> None:
        """Restore files to slot 0; whatever they are, it is as it was or can be used."""
        for suffix in SUFFIXES:
            path = self.live.slot_files / f"x{suffix}"
            path.unlink(missing_ok=True)
            if suffix in files:
                path.write_bytes(files[suffix])
        if sealed:
            subprocess.run([self._sealer, self.live.slot_files, "x"], check=True)

        held = self.live.slots()[0]["n_prompt_tokens"]
        answer = self.live.file(0, "restore", "x")
        if answer.status == 200:
            self.n_taken += 1
            assert all(each["file"] and each["why"] for each in answer.body["lost"])
            assert self.hold("b")["tokens"] == self._said
        else:
            self.n_refused += 1
            assert answer.error["type"] == "page_refused"
            assert answer.error["reason"] in REASONS, answer.error
            assert answer.error["message"]
            assert self.live.slots()[0]["n_prompt_tokens"] == held
            again = self.hold("b")
            assert again["tokens"] == self._said
            assert again["timings"]["cache_n"] > 0


@pytest.fixture(scope="module")
def sealer() -> Path:
    """What makes the checksums of files right; started often, so without sanitizers."""
    plain = dataclasses.replace(native_programs.host(), flags=native_programs.WARNINGS)
    return native_programs.built(native_programs.NATIVE / "seal-page-files.cpp", plain)


@pytest.mark.parametrize("model", KINDS)
def test_files_that_lie_cost_nobody_but_their_page(
    engine_path: Path, tiny: TinyModels, sealer: Path, model: str
) -> None:
    wide = ("--override-kv", f"{model.split('-')[0]}.context_length=int:65536")
    options = (*tiny.options(KINDS[model]), *wide, "--cache-ram", "0")
    with live_engine(engine_path, tiny.model(model), *options) as live, streams(live) as started:
        sweep = Sweep(live, sealer, started)
        hostile = Hostile({name: sweep.save(name) for name in PROMPTS}, random.Random(SEED))
        assert {*hostile.pages["a"]} > {"", ".ckpt"}
        process = psutil.Process(live.process.pid)
        settled, stream = 0, sweep.stream()
        for n in range(N_MUTATIONS):
            what, files, sealed = hostile.made()
            try:
                sweep.restore(files, sealed=sealed)
            except (AssertionError, httpx.TransportError) as error:
                done = f"{n}: {what}, checksums made right: {sealed}"
                raise AssertionError(f"{done}\n{live.log()[-2000:]}") from error
            if stream.ended:
                sweep.finish(stream)
                stream = sweep.stream()
            if n == N_SETTLED:
                settled = resident(process)
        sweep.finish(stream)
        assert resident(process) < settled + N_BYTES_GROWN_MOST
        assert min(sweep.n_taken, sweep.n_refused) > N_MUTATIONS // 10


@pytest.mark.parametrize("position", [-1, 2**31 - 1])
def test_a_position_that_is_none_is_refused(
    engine_path: Path, tiny: TinyModels, sealer: Path, position: int
) -> None:
    options = ("--override-kv", "qwen35.context_length=int:65536", *KINDS["qwen35-mtp"])
    model = tiny.model("qwen35-mtp")
    with live_engine(engine_path, model, *options) as live, streams(live) as started:
        sweep = Sweep(live, sealer, started)
        files = sweep.save("a")
        content = bytearray(files[".dft"])
        content[CELL_POSITION : CELL_POSITION + 4] = position.to_bytes(4, "little", signed=True)
        for _ in range(2):
            sweep.restore(files | {".dft": bytes(content)}, sealed=True)
        sweep.restore(files, sealed=False)
        assert sweep.n_refused == 2
