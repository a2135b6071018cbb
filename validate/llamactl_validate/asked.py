"""What an engine is asked over HTTP, whoever has started it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from llamactl_validate.expecting import Failed, Skipped, expect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Json = dict[str, Any]
_NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
"""The engine's keep-alive closes race with a client's next request."""


@dataclass(frozen=True)
class Answer:
    """Status and JSON body."""

    status: int
    body: Any

    @property
    def receipt(self) -> Json:
        """The receipt of what was not refused."""
        expect(f"the answer {json.dumps(self.body)}", self.status, 200)
        body: Json = self.body
        return body

    @property
    def error(self) -> Json:
        """The error of a refusal; nothing else is in the body."""
        expect(f"the fields of the refusal {json.dumps(self.body)}", list(self.body), ["error"])
        error: Json = self.body["error"]
        expect("the code of the refusal", error["code"], self.status)
        return error


class Asked:
    """An engine behind the door `http`; `patience_s` bounds every answer."""

    def __init__(self, http: httpx.Client, patience_s: float) -> None:
        self.http = http
        """The door that requests go through."""
        self.patience_s = patience_s

    def props(self) -> Json:
        """Return /props without `compute_progress`, which tells of the moment only."""
        props: Json = self.http.get("/props").raise_for_status().json()
        props.pop("compute_progress", None)
        return props

    def geometry(self) -> Json:
        """Return the geometry that serves."""
        geometry: Json = self.props()["context_geometry"]
        return geometry

    def slots(self) -> list[Json]:
        """Return /slots."""
        slots: list[Json] = self.http.get("/slots").raise_for_status().json()
        return slots

    def room_for(self, n_tokens: int) -> None:
        """Raise `Skipped` where a slot cannot hold so many tokens, whatever its context is."""
        n_there: int = self.slots()[0]["n_ctx"]
        if n_there <= n_tokens:
            raise Skipped(f"the model takes {n_there} tokens in a slot, not {n_tokens}")

    def held(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        n_tokens: int = self.slots()[slot]["n_prompt_tokens"]
        return n_tokens

    def reconfigure(self, **fields: object) -> Answer:
        """Ask for a change."""
        return self.reconfigure_raw(json.dumps(fields))

    def reconfigure_raw(self, body: str) -> Answer:
        """Ask for a change with any body."""
        answer = self.http.post("/reconfigure", content=body)
        return Answer(answer.status_code, answer.json())

    def applied(self, **fields: object) -> Json:
        """Change the geometry on weights that were loaded once; return the receipt."""
        receipt = self.reconfigure(**fields).receipt
        expect("the outcome of the change", receipt["outcome"], "applied")
        expect("how often the weights were loaded", receipt["n_weight_loads"], 1)
        return receipt

    def metric(self, name: str) -> float:
        """Return the value of one metric without labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"llamacpp:{name} "):
                return float(line.split()[1])
        raise Failed(f"no metric {name}")

    def ask(self, path: str, **body: object) -> Answer:
        """Post JSON."""
        answer = self.http.post(path, json=body)
        return Answer(answer.status_code, answer.json())

    def page(self, slot: object, action: str, name: str) -> Answer:
        """Ask for a page verb."""
        answer = self.http.post(f"/slots/{slot}?action={action}&page={quote(name, safe='')}")
        return Answer(answer.status_code, answer.json())

    def file(self, slot: object, action: str, name: str) -> Answer:
        """Save or restore a slot."""
        return self.ask(f"/slots/{slot}?action={action}", filename=name)

    def spill(self, name: str, **body: object) -> Answer:
        """Write a page to files."""
        return self.ask(f"/slots/0?action=spill&page={quote(name, safe='')}", **body)

    def pages(self) -> list[Json]:
        """Return /pages."""
        pages: list[Json] = self.http.get("/pages").raise_for_status().json()
        return pages

    def erase(self, *slots: int) -> None:
        """Forget the conversations of these slots (default: of all)."""
        for slot in slots or range(self.geometry()["n_seq"]):
            self.http.post(f"/slots/{slot}?action=erase").raise_for_status()

    def events(self, path: str, body: Mapping[str, object]) -> Iterator[Json]:
        """Yield the events of a streamed answer; it must come to its end without an error."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
                raise Failed(f"a stream was answered with {answer.status_code}: {answer.text}")
            for line in answer.iter_lines():
                if line.startswith('data: {"error"'):
                    raise Failed(f"a stream tells of an error: {line}")
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def private_door(socket: Path, patience_s: float) -> httpx.Client:
    """Return a client of an engine's unix socket."""
    unix = httpx.HTTPTransport(uds=str(socket), limits=_NO_KEEP_ALIVE)
    return httpx.Client(base_url="http://engine", transport=unix, timeout=patience_s)


def public_door(port: int, patience_s: float) -> httpx.Client:
    """Return a client of an engine's TCP port on this machine."""
    url = f"http://127.0.0.1:{port}"
    return httpx.Client(base_url=url, limits=_NO_KEEP_ALIVE, timeout=patience_s, trust_env=False)
