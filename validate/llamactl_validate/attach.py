"""Looks at an engine that runs already, and changes nothing: `ASKED` is all that it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from llamactl_supervisor import keys
from llamactl_supervisor.errors import InvalidRequestError

from llamactl_validate.expecting import Skipped, expect, expect_that
from llamactl_validate.scenario import Scenario

if TYPE_CHECKING:
    from llamactl_validate.scenario import Trial

NO_ENGINE = "no_engine"
ASKED = (
    *("GET /health", "GET /props", "GET /pages"),
    "and unless it sleeps GET /slots and POST /reconfigure with dry_run, which changes nothing",
)
ANSWER_S = 60.0
"""It may be in the middle of a long batch."""
CONNECT_S = 5.0
"""With the handshake of an https URL: a port that speaks plain HTTP leaves that unanswered."""


class Running:
    """An engine at a URL, or at the path of its unix socket; `key_file` holds what it asks for.

    Raises `invalid_request` for a file without a key, and where nobody answers there.
    """

    def __init__(self, where: str, key_file: Path | None) -> None:
        headers = {}
        if key_file is not None:
            key = keys.read(str(key_file)).split(b"\n", 1)[0].strip().decode()
            headers["Authorization"] = f"Bearer {key}"
        is_url = where.startswith(("http://", "https://"))
        if not is_url and not Path(where).is_socket():
            raise _nowhere(f"{where} is neither a URL nor a unix socket")
        try:
            self._http = httpx.Client(
                base_url=where if is_url else "http://engine",
                transport=None if is_url else httpx.HTTPTransport(uds=where),
                headers=headers,
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
                trust_env=False,
            )
            health = self._http.get("/health")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise _nowhere(f"nobody answers at {where}: {exc}") from exc
        if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise _nowhere(f"the engine at {where} does not serve yet")

    def close(self) -> None:
        """Let go of it."""
        self._http.close()

    def scenarios(self) -> list[Scenario]:
        """Return what can be shown without a change."""
        looks = {
            "serves": ("it serves, on weights that were loaded", self._serves),
            "slots": ("it has the slots of its geometry", self._slots),
            "pages": ("every parked conversation is among its pages, whole", self._pages),
            "dry-run": ("a change is planned without being made", self._dry_run),
        }
        return [
            Scenario(name, "attach", title, run, (0, 0), (0, 0))
            for name, (title, run) in looks.items()
        ]

    def _get(self, path: str) -> Any:
        answer = self._http.get(path)
        if answer.status_code in (401, 403):
            raise Skipped(f"{path} wants another key, or its private socket")
        expect(f"the status of {path}", answer.status_code, 200)
        return answer.json()

    def _geometry(self) -> dict[str, Any]:
        props = self._get("/props")
        if "context_geometry" not in props:
            raise Skipped("it is no engine of ours: /props tells no geometry")
        geometry: dict[str, Any] = props["context_geometry"]
        return geometry

    def _awake(self) -> None:
        if self._get("/props").get("is_sleeping"):
            raise Skipped("it sleeps, and would load its weights to answer")

    def _serves(self, trial: Trial) -> None:
        expect("/health", self._get("/health"), {"status": "ok"})
        geometry = self._geometry()
        n_loads = self._get("/props")["n_weight_loads"]
        expect_that("its weights were loaded", n_loads >= 1, n_loads)
        trial.measure("tokens", geometry["n_ctx"])
        trial.measure("weight loads", n_loads)

    def _slots(self, trial: Trial) -> None:
        self._awake()
        slots, n_seq = self._get("/slots"), self._geometry()["n_seq"]
        serving = [slot["id"] for slot in slots if "parked" not in slot]
        expect("the slots that serve", serving, list(range(n_seq)))
        trial.measure("slots", n_seq)
        trial.measure("parked", len(slots) - n_seq)

    def _pages(self, trial: Trial) -> None:
        self._awake()
        before, slots = self._get("/pages"), self._get("/slots")
        if _ages_apart(self._get("/pages")) != _ages_apart(before):
            raise Skipped("its pages changed meanwhile")
        parked = {slot["page"]: slot["n_prompt_tokens"] for slot in slots if "parked" in slot}
        held = {page["name"]: page["n_tokens"] for page in before}
        expect("the parked ones among the pages", {name: held.get(name) for name in parked}, parked)
        trial.measure("pages", len(before))
        trial.measure("bytes", sum(page["n_bytes"] for page in before))

    def _dry_run(self, trial: Trial) -> None:
        self._awake()
        before = self._geometry()
        body = {"n_ctx": 2 * before["n_ctx"], "n_seq": before["n_seq"], "dry_run": True}
        answer = self._http.post("/reconfigure", json=body)
        if answer.status_code == 403:
            raise Skipped("it takes changes on its private socket only")
        if answer.status_code != 200:
            raise Skipped(f"it refuses the change: {answer.json()['error']['message']}")
        receipt = answer.json()
        expect("the outcome", receipt["outcome"], "planned")
        expect("the pause", receipt["pause_ms"], 0)
        expect("the geometry afterwards", self._geometry(), before)
        trial.measure("twice the context needs", sum(receipt["bytes_needed"].values()), "bytes")


def _ages_apart(pages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in page.items() if name != "age_s"} for page in pages]


def _nowhere(message: str) -> InvalidRequestError:
    return InvalidRequestError(NO_ENGINE, f"not run: {message}")
