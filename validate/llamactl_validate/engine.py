"""A llama-server of one's own on a private socket, and generations that are changed as they run."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from llamactl_validate import lowly, running
from llamactl_validate.asked import Asked, Json, private_door, public_door
from llamactl_validate.expecting import Failed, expect, expect_that, until
from llamactl_validate.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

N_CTX, N_SEQ = 4096, 2
"""The geometry that an engine starts with where its options say no other."""
CHUNKS_BEFORE = 8
"""Chunks that each generation has sent before the next change."""
PATIENT_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""The engine's threads sleep while they wait for each other. On a machine with other work to do,
spinning threads take the processor from the one that they wait for: 150 times slower was seen."""
TRIES = 5
"""A change that comes after the generation's end says nothing: that run is taken again."""
LAST_LINES = 5
OPTIONS_OF_ENV = "LLAMA_"
"""Begins what llama-server takes from the environment: options, and a key."""


@dataclass(frozen=True)
class Generation:
    """What one streamed request wrote: for each prompt its text, slot and counts."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Of the tokens, where `n_probs` asks for them: bit for bit what the logits were."""
    slots: tuple[int, ...]
    draft_counts: tuple[tuple[int, int], ...]
    receipts: tuple[Json, ...]
    changed_in_time: bool
    """Every change came while all prompts of the request were still being answered."""

    @property
    def written(self) -> tuple[object, ...]:
        """All that a change must not alter."""
        return self.texts, self.tokens, self.logprobs, self.slots, self.draft_counts


class Engine(Asked):
    """One llama-server on a unix socket, and on a TCP port where one is given.

    It goes when the thread that started it goes. `idle`: at the lowest priority.
    `patience_s` bounds the load, and every answer.
    """

    def __init__(
        self,
        program: Path,
        model: Path | None,
        *options: str,
        patience_s: float,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        idle: bool = True,
    ) -> None:
        self._open = ExitStack()
        self.place = Workplace()
        self._open.callback(self.place.close)
        self.socket, self.slot_files = self.place.socket, self.place.slot_files
        words = [str(program), *(("--model", str(model)) if model else ()), "--no-ui"]
        words += _address(self.socket, port)
        words += ["--ctx-size", str(N_CTX), "--parallel", str(N_SEQ)]
        words += ["--slot-save-path", str(self.slot_files), *options]
        self._may_be_dead = False
        try:
            self.unix = self._open.enter_context(private_door(self.socket, patience_s))
            http = self.unix
            if port is not None:
                http = self._open.enter_context(public_door(port, patience_s))
            super().__init__(http, patience_s)
            self.process = self._spawned(words, idle=idle, env=dict(env or {}))
            until("the engine loads", self._serves_or_ended, within_s=patience_s)
            if self.process.poll() is not None:
                raise Failed(self.death())
            self._first = self.unix.get("/props").json().get("context_geometry")
        except BaseException:
            self._open.close()
            raise

    def _spawned(
        self, words: list[str], *, idle: bool, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        flag = lowly.IDLE if idle else lowly.EQUAL
        launcher = [sys.executable, "-P", "-m", lowly.__name__, str(os.getpid()), flag]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(OPTIONS_OF_ENV)
        }
        with self.place.log.open("wb") as log:
            process = subprocess.Popen(
                [*launcher, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | PATIENT_THREADS | env,
            )
        self._open.callback(_ended, process)
        running.add(process, process.kill)
        return process

    def _serves_or_ended(self) -> bool:
        if _listens(self.socket):
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/health").status_code == 200
        return self.process.poll() is not None

    def log(self) -> str:
        """Return what the engine wrote."""
        return self.place.log.read_text(errors="replace")

    def death(self) -> str:
        """Return how it ended, with its last lines."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        status = self.process.poll()
        return f"the engine ended with status {status}: {' | '.join(lines[-LAST_LINES:])}"

    @property
    def lives(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Have it die at once, as it is wanted here."""
        self._may_be_dead = True
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the engine; it must have lived until now, or ended as it was told."""
        is_well = self._may_be_dead or self.process.poll() in (None, 0)
        said = None if is_well else self.death()
        self._open.close()
        if said is not None:
            raise Failed(said)

    def reset(self) -> None:
        """Empty every slot, drop every page and go back to the geometry that it started with."""
        until("the slots come to rest", self._rests, within_s=self.patience_s)
        self.erase()
        until("every page is dropped", self._drops_pages, within_s=self.patience_s)
        first = {name: self._first[name] for name in ("n_ctx", "n_seq", "kv_unified")}
        receipt = self.reconfigure(**first).receipt
        expect("the first geometry", receipt["geometry"], receipt["geometry"] | first)

    def _rests(self) -> bool:
        return not any(slot["is_processing"] for slot in self.slots())

    def _drops_pages(self) -> bool:
        """Drop every page but those of requests that wait, which go when it is seen that nobody
        reads them."""
        for page in self.pages():
            self.page(0, "page_drop", page["name"])
        return not self.pages()

    def saved_state(self, slot: int) -> bytes:
        """Return a slot's state, as libllama writes it to a file."""
        name = f"{slot}.state"
        expect("the status of a save", self.file(slot, "save", name).status, 200)
        content = (self.slot_files / name).read_bytes()
        # Magic and version, the number of token words, the words, and the state proper.
        n_words = int(struct.unpack_from("<I", content, 8)[0])
        return content[12 + 4 * n_words :]

    def generate(self, body: Json, changes: Sequence[Json] = ()) -> Generation:
        """Stream /completion for a list of prompts, with reconfigures in the middle.

        One request starts all its prompts in one batch, so runs group their steps alike.
        """
        n = len(body["prompt"])
        chunks: list[list[Json]] = [[] for _ in range(n)]
        left, receipts = list(changes), list[Json]()
        for event in self.events("/completion", body):
            chunks[event["index"]].append(event)
            due = CHUNKS_BEFORE * (len(receipts) + 1)
            if left and all(len(each) >= due for each in chunks):
                receipts.append(self.applied(**left.pop(0)))
        last = [each[-1] for each in chunks]
        expect_that("every generation came to its end", all(end["stop"] for end in last))
        expect("changes that no generation lived to see", left, [])
        timings = [end["timings"] for end in last]
        return Generation(
            texts=tuple("".join(event["content"] for event in each) for each in chunks),
            tokens=tuple(_gathered(each, "tokens") for each in chunks),
            logprobs=tuple(
                tuple(token["logprob"] for token in _gathered(each, "completion_probabilities"))
                for each in chunks
            ),
            slots=tuple(end["id_slot"] for end in last),
            draft_counts=tuple(
                (counts.get("draft_n", 0), counts.get("draft_n_accepted", 0)) for counts in timings
            ),
            receipts=tuple(receipts),
            changed_in_time=all(_before_the_end(receipt, last) for receipt in receipts),
        )

    def generate_changed(self, body: Json, changes: Sequence[Json]) -> Generation:
        """Like `generate`, where every change came while every prompt was being answered."""
        for _ in range(TRIES):
            generation = self.generate(body, changes)
            if generation.changed_in_time:
                return generation
            self.reset()
        raise Failed(f"no change came in time: {generation.receipts}")


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    running.ended(process)


def _address(path: Path, port: int | None) -> list[str]:
    """Return the options of a private socket, and of a port where one is given."""
    if port is None:
        return ["--host", str(path)]
    return ["--host", f"127.0.0.1,{path}", "--port", str(port)]


def _listens(path: Path) -> bool:
    """Whether somebody does; httpx loses hold of a socket that could not be connected."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _gathered(events: Sequence[Json], field: str) -> tuple[Any, ...]:
    """Return one field's lists of all the events as one; the last event only repeats them."""
    return tuple(item for event in events if not event["stop"] for item in event.get(field, ()))


def _before_the_end(receipt: Json, last: Sequence[Json]) -> bool:
    """Whether no prompt's generation had ended when its slot was moved."""
    held = sorted(slot["tokens"] for slot in receipt["slots"])
    ends = sorted(end["tokens_evaluated"] + end["tokens_predicted"] - 1 for end in last)
    return len(held) == len(ends) and all(a < b for a, b in zip(held, ends, strict=True))
