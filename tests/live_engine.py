"""A real llama-server without a daemon, and generations that are changed while they run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from sandbox import WITHIN_S, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

N_CTX, N_SEQ = 4096, 2
"""The geometry that every test starts from."""
CHUNKS_BEFORE = 8
"""Chunks that each generation has sent before the next change."""
PATIENT_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""The engine's threads sleep while they wait for each other. On a machine with other work to do,
spinning threads take the processor from the one that they wait for: 150 times slower was seen."""
TRIES = 5
"""A change that comes after the generation's end says nothing: that run is taken again."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Status and JSON body."""

    status: int
    body: Any

    @property
    def receipt(self) -> Json:
        """The receipt of a change that was not refused."""
        assert self.status == 200, self.body
        assert isinstance(self.body, dict)
        return self.body

    @property
    def error(self) -> Json:
        """The error of a refusal; nothing else is in the body."""
        assert list(self.body) == ["error"], self.body
        error: Json = self.body["error"]
        assert error["code"] == self.status
        return error


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


class LiveEngine:
    """One llama-server on a TCP port and a unix socket."""

    def __init__(
        self, engine: Path, model: Path | None, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        # Not pytest's tmp_path: the path of a socket may have 107 bytes only.
        self.root = Path(tempfile.mkdtemp(prefix="llamactl-"))
        self.socket = self.root / "engine.sock"
        self.slot_files = self.root / "slots"
        self.slot_files.mkdir()
        self.port = free_port()
        words = [str(engine), *(("--model", str(model)) if model else ()), "--no-ui"]
        words += ["--host", f"127.0.0.1,{self.socket}", "--port", str(self.port)]
        words += ["--ctx-size", str(N_CTX), "--parallel", str(N_SEQ)]
        words += ["--slot-save-path", str(self.slot_files), *options]
        # The engine's keep-alive closes race with a client's next request.
        limits = httpx.Limits(max_keepalive_connections=0)
        unix = httpx.HTTPTransport(uds=str(self.socket), limits=limits)
        self.tcp = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", limits=limits, timeout=WITHIN_S
        )
        self.unix = httpx.Client(base_url="http://engine", transport=unix, timeout=WITHIN_S)
        with (self.root / "log").open("wb") as log:
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | PATIENT_THREADS | dict(env or {}),
            )
        until(self._serves_or_ended)
        assert self.process.poll() is None, self.log()

    def _serves_or_ended(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.tcp.get("/health").status_code == 200
        return self.process.poll() is not None

    def log(self) -> str:
        """Return what the engine wrote."""
        return (self.root / "log").read_text(errors="replace")

    def close(self) -> None:
        """End the engine; it must have lived until now."""
        lived = self.process.poll()
        self.process.kill()
        self.process.wait(WITHIN_S)
        self.tcp.close()
        self.unix.close()
        log = self.log()
        shutil.rmtree(self.root)
        assert lived in (None, 0), log

    def props(self) -> Json:
        """Return /props without `compute_progress`, which tells of the moment only."""
        props: Json = self.tcp.get("/props").raise_for_status().json()
        props.pop("compute_progress", None)
        return props

    def geometry(self) -> Json:
        """Return the geometry that serves."""
        geometry: Json = self.props()["context_geometry"]
        return geometry

    def slots(self) -> list[Json]:
        """Return /slots."""
        slots: list[Json] = self.tcp.get("/slots").raise_for_status().json()
        return slots

    def reconfigure(self, **fields: object) -> Answer:
        """Ask for a change."""
        return self.reconfigure_raw(json.dumps(fields))

    def reconfigure_raw(self, body: str) -> Answer:
        """Ask for a change with any body."""
        answer = self.tcp.post("/reconfigure", content=body)
        return Answer(answer.status_code, answer.json())

    def applied(self, **fields: object) -> Json:
        """Change the geometry on weights that were loaded once; return the receipt."""
        receipt = self.reconfigure(**fields).receipt
        assert (receipt["outcome"], receipt["n_weight_loads"]) == ("applied", 1)
        return receipt

    def metric(self, name: str) -> float:
        """Return the value of one metric without labels."""
        for line in self.tcp.get("/metrics").text.splitlines():
            if line.startswith(f"llamacpp:{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def ask(self, path: str, **body: object) -> Answer:
        """Post JSON."""
        answer = self.tcp.post(path, json=body)
        return Answer(answer.status_code, answer.json())

    def page(self, slot: object, action: str, name: str) -> Answer:
        """Ask for a page verb."""
        answer = self.tcp.post(f"/slots/{slot}?action={action}&page={quote(name, safe='')}")
        return Answer(answer.status_code, answer.json())

    def file(self, slot: object, action: str, name: str) -> Answer:
        """Save or restore a slot."""
        return self.ask(f"/slots/{slot}?action={action}", filename=name)

    def spill(self, name: str, **body: object) -> Answer:
        """Write a page to files."""
        return self.ask(f"/slots/0?action=spill&page={quote(name, safe='')}", **body)

    def pages(self) -> list[Json]:
        """Return /pages."""
        pages: list[Json] = self.tcp.get("/pages").raise_for_status().json()
        return pages

    def erase(self, *slots: int) -> None:
        """Forget the conversations of these slots (default: of all)."""
        for slot in slots or range(self.geometry()["n_seq"]):
            self.tcp.post(f"/slots/{slot}?action=erase").raise_for_status()

    def reset(self) -> None:
        """Empty every slot and go back to the geometry that tests start from."""
        until(lambda: not any(slot["is_processing"] for slot in self.slots()))
        self.erase()
        while self.props()["parked"]:
            # both differ from what any test leaves behind, so one of them is a change
            for n_seq in (15, 16):
                self.reconfigure(n_ctx=n_seq * 8192, n_seq=n_seq, kv_unified=False)
            self.erase()
        receipt = self.reconfigure(n_ctx=N_CTX, n_seq=N_SEQ, kv_unified=False).receipt
        assert receipt["geometry"] | {"n_ctx": N_CTX, "n_seq": N_SEQ} == receipt["geometry"]

    def saved_state_bytes(self, slot: int) -> int:
        """Return the size of a slot's state, as libllama writes it to a file."""
        name = f"{slot}.state"
        assert self.ask(f"/slots/{slot}?action=save", filename=name).status == 200
        content = (self.slot_files / name).read_bytes()
        # Magic and version, as long as the magic and sequence id of a state in memory; then the
        # number of token words, the words, and the state proper.
        n_words = struct.unpack_from("<I", content, 8)[0]
        return len(content) - 4 - 4 * int(n_words)

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
                receipts.append(self.reconfigure(**left.pop(0)).receipt)
        assert all(receipt["outcome"] == "applied" for receipt in receipts)
        last = [each[-1] for each in chunks]
        assert all(end["stop"] for end in last)
        assert not left
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
        raise AssertionError(f"no change came in time: {generation.receipts}")

    def events(self, path: str, body: Mapping[str, object]) -> Iterator[Json]:
        """Yield the events of a streamed answer; it must come to its end without an error."""
        with self.tcp.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                assert not line.startswith('data: {"error"'), line
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


class Faulty:
    """An engine that fails at the steps that are written to a file."""

    def __init__(self, live: LiveEngine, faults: Path) -> None:
        self.live = live
        self._faults = faults

    def inject(self, *steps: str) -> None:
        """From the next change or page verb on, fail at these steps and no others."""
        self._faults.write_text("".join(f"{step}\n" for step in steps))


def _gathered(events: Sequence[Json], field: str) -> tuple[Any, ...]:
    """Return one field's lists of all the events as one; the last event only repeats them."""
    return tuple(item for event in events if not event["stop"] for item in event.get(field, ()))


def _before_the_end(receipt: Json, last: Sequence[Json]) -> bool:
    """Whether no prompt's generation had ended when its slot was moved."""
    held = sorted(slot["tokens"] for slot in receipt["slots"])
    ends = sorted(end["tokens_evaluated"] + end["tokens_predicted"] - 1 for end in last)
    return len(held) == len(ends) and all(a < b for a, b in zip(held, ends, strict=True))


@contextlib.contextmanager
def live_engine(
    engine: Path, model: Path | None, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[LiveEngine]:
    """Yield an engine that has loaded its model; it must not have died before the end."""
    live = LiveEngine(engine, model, *options, env=env)
    try:
        yield live
    finally:
        live.close()
