"""The API's edge: one shape of error whatever is wrong, and nothing a handler decides itself."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
import pytest
from llamactl_supervisor import asking, control, view
from llamactl_supervisor import events as ev
from llamactl_supervisor.config import Paths, Settings
from llamactl_supervisor.errors import error
from llamactl_supervisor.models import (
    ConfigValue,
    DaemonStatus,
    EngineLook,
    EngineState,
    Ledger,
    OperationKind,
    Page,
    Pages,
    Problem,
    RunningConfig,
    Slots,
    SlotState,
    Status,
    Takes,
    Totals,
)
from llamactl_supervisor.operations import Operations
from llamactl_supervisor.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from llamactl_supervisor.events import Command
    from llamactl_supervisor.models import ApplyRequest, Operation, RunRequest

ENGINE = {"model": "/m.gguf", "n_ctx": 16384, "n_seq": 2, "port": 8080}
LAX: tuple[object, ...] = ("yes", "true", "", 1, 0, 1.0, [])
UP = {"spec": ENGINE, "engine_path": "/e"}
PAGE = {"name": "fox", "n_tokens": 40, "n_bytes": 9, "something_newer": 1}
SLOT = {"id": 0, "n_ctx": 8192, "something_newer": 1}


class FakeDaemon:
    """Takes every command and does nothing about it."""

    def __init__(self, tmp_path: Path) -> None:
        self.paths = Paths(tmp_path, tmp_path, tmp_path)
        self.operations = Operations()
        self.commands: list[Command] = []
        self.state = EngineState.STOPPED
        self.applied: ApplyRequest | None = None
        self.refusal: Exception | None = None
        self.asked: tuple[datetime | None, int] | None = None

    async def submit(
        self, kind: OperationKind, by: str, command: Callable[[str], Command]
    ) -> Operation:
        if self.refusal is not None:
            raise self.refusal
        operation = self.operations.create(kind, by)
        self.commands.append(command(operation.id))
        return operation

    async def apply(self, by: str, asked: ApplyRequest) -> Operation:
        if self.refusal is not None:
            raise self.refusal
        self.applied = asked
        return self.operations.create(OperationKind.APPLY, by)

    async def wait(self, operation: str, wait_s: float) -> Operation:
        return await self.operations.wait(operation, wait_s)

    def status(self) -> Status:
        daemon = DaemonStatus.parse(
            {"pid": 1, "version": "1", "started_at": 0, "control_socket": "/c", "log_dir": "/l"}
        )
        snapshot = Snapshot(seed=UUID(int=0), settings=Settings(), state=self.state)
        return view.status(
            snapshot,
            0.0,
            self.paths,
            daemon=daemon,
            config=None,
            operation=None,
            strangers=(),
            unsaved=None,
            ledger_lost=0,
            in_files=(0, 0),
            lost=(),
            crash_record=None,
            weight_loads=0,
            loads_avoided=0,
        )

    def config(self) -> RunningConfig:
        known = {"n_ctx": ConfigValue(read=1, running=2, after_restart=3, takes=Takes.RELOAD)}
        return RunningConfig(pid=1, file=None, values=known)

    async def pages(self) -> Pages:
        if self.refusal is not None:
            raise self.refusal
        return Pages(pages=(Page.model_validate(PAGE),))

    async def slots(self) -> Slots:
        if self.refusal is not None:
            raise self.refusal
        return Slots(slots=(SlotState.model_validate(SLOT),))

    async def look(self) -> EngineLook:
        slots = await self.slots()
        return EngineLook(asleep=False, slots=slots.slots, pages=(await self.pages()).pages)

    async def ledger(self, since: datetime | None, limit: int) -> Ledger:
        self.asked = (since, limit)
        return Ledger(lines=(), totals=Totals())

    async def metrics(self) -> bytes:
        return b"llamactl_weight_loads_total 1.0\n"

    async def log_lines(
        self, count: int, *, follow: bool, since: datetime | None, run: str | None
    ) -> AsyncIterator[bytes]:
        assert run is None
        yield f"{count} {follow} {since}\n".encode()

    async def run_engine(self, asked: RunRequest, pid: int) -> AsyncIterator[bytes]:
        yield f"{asked.argv} {pid}\n".encode()


@pytest.fixture
def daemon(tmp_path: Path) -> FakeDaemon:
    return FakeDaemon(tmp_path)


def call(daemon: FakeDaemon, method: str, path: str, **request: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        app = control.create_app(daemon, "1.2.3")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://llamactl") as client:
            return await client.request(method, path, **request)

    return asyncio.run(scenario())


MUTATIONS = {
    **{key: {} for key in ("start", "stop", "restart", "down", "reload")},
    "apply": {},
    "run": {},
    "up": UP,
    "reconfigure": {"n_ctx": 131072},
    **{key: {"name": "fox"} for key in ("pages/out", "pages/in", "pages/drop", "pages/spill")},
    **{key: {"filename": "fox"} for key in ("pages/save", "pages/restore")},
}


def test_no_mutation_is_begun_that_its_caller_has_given_up(daemon: FakeDaemon) -> None:
    paths = call(daemon, "GET", "/openapi.json").json()["paths"]
    assert {f"/v1/{name}" for name in MUTATIONS} == {
        path for path, methods in paths.items() if set(methods) - {"get"}
    }
    past = {asking.EXPIRES: f"{time.clock_gettime(time.CLOCK_BOOTTIME) - 0.1}"}
    future = {asking.EXPIRES: f"{time.clock_gettime(time.CLOCK_BOOTTIME) + 60}"}
    for name, body in MUTATIONS.items():
        answer = call(daemon, "POST", f"/v1/{name}", json=body, headers=past)
        assert (answer.status_code, answer.json()["code"]) == (409, "request_expired"), name
    assert daemon.commands == []
    assert call(daemon, "POST", "/v1/stop", headers=future).status_code == 202
    broken = call(daemon, "POST", "/v1/stop", headers={asking.EXPIRES: "soon"})
    assert (broken.status_code, broken.json()["code"]) == (400, "invalid_request")
    assert len(daemon.commands) == 1


def test_every_mutation_is_an_operation(daemon: FakeDaemon) -> None:
    bodies: dict[str, Any] = {"up": UP, "reconfigure": {"n_ctx": 131072}}
    for kind in ("up", "start", "stop", "restart", "down", "reconfigure"):
        answer = call(daemon, "POST", f"/v1/{kind}", json=bodies.get(kind))
        assert answer.status_code == 202
        assert (answer.json()["kind"], answer.json()["state"]) == (kind, "running")
    names = [type(command).__name__.lower() for command in daemon.commands]
    assert names == ["up", "start", "stop", "restart", "down", "reconfigure"]


def test_an_apply_knows_what_was_left_out(daemon: FakeDaemon) -> None:
    body = {"engine": {"n_ctx": "auto"}, "live_only": True}
    answer = call(daemon, "POST", "/v1/apply", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (202, "apply")
    assert daemon.applied is not None
    assert daemon.applied.engine.model_fields_set == {"n_ctx"}
    assert (daemon.applied.live_only, daemon.applied.replace) == (True, False)


@pytest.mark.parametrize("name", ["fox", "", "a/b", "../x", "..", "a b", "ä", "x\n", "?#&"])
def test_a_page_verb_takes_any_name_for_the_engine_to_judge(daemon: FakeDaemon, name: str) -> None:
    for verb, slot in (("out", {"slot": 1}), ("in", {"slot": 1}), ("drop", {})):
        answer = call(daemon, "POST", f"/v1/pages/{verb}", json={"name": name} | slot)
        assert (answer.status_code, answer.json()["kind"]) == (202, f"page_{verb}")
    ids = [command.operation for command in daemon.commands]
    assert daemon.commands == [
        ev.Page(ids[0], OperationKind.PAGE_OUT, name, 1),
        ev.Page(ids[1], OperationKind.PAGE_IN, name, 1),
        ev.Page(ids[2], OperationKind.PAGE_DROP, name),
    ]


@pytest.mark.parametrize("name", ["fox", "", "a/b", "../x", "..", "a b", "ä", "x\n", "x.ckpt"])
def test_a_verb_with_files_takes_any_name_for_the_engine_to_judge(
    daemon: FakeDaemon, name: str
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("spill", {"name": name}),
        ("spill", {"name": "fox", "filename": name, "drop": True}),
        ("save", {"filename": name, "slot": 1}),
        ("restore", {"filename": name, "slot": 2}),
    ]
    for verb, body in bodies:
        answer = call(daemon, "POST", f"/v1/pages/{verb}", json=body)
        assert (answer.status_code, answer.json()["kind"]) == (202, f"page_{verb}")
    ids = [command.operation for command in daemon.commands]
    assert daemon.commands == [
        ev.PageFile(ids[0], OperationKind.PAGE_SPILL, name, page=name),
        ev.PageFile(ids[1], OperationKind.PAGE_SPILL, name, page="fox", drop=True),
        ev.PageFile(ids[2], OperationKind.PAGE_SAVE, name, 1),
        ev.PageFile(ids[3], OperationKind.PAGE_RESTORE, name, 2),
    ]


def test_pages_and_slots_are_what_the_engine_said(daemon: FakeDaemon) -> None:
    assert call(daemon, "GET", "/v1/pages").json() == {"pages": [PAGE]}
    assert call(daemon, "GET", "/v1/slots").json() == {"slots": [SLOT]}
    daemon.refusal = error("engine_stopped", "there is no running engine")
    for path in ("/v1/pages", "/v1/slots", "/v1/engine"):
        answer = call(daemon, "GET", path)
        assert (answer.status_code, answer.json()["code"]) == (409, "engine_stopped")


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/v1/reconfigure", {"n_ctx": 0}, "invalid_geometry", "n_ctx"),
        ("/v1/reconfigure", {"n_ctx": 10**12}, "invalid_geometry", "n_ctx"),
        ("/v1/reconfigure", {"n_ctx": "big"}, "invalid_request", "n_ctx"),
        ("/v1/reconfigure", {"n_ctx": "8192"}, "invalid_request", "n_ctx"),
        ("/v1/reconfigure", {"n_ctx": 8192.0}, "invalid_request", "n_ctx"),
        ("/v1/reconfigure", {"n_ctx": True}, "invalid_request", "n_ctx"),
        ("/v1/reconfigure", {"n_seq": 2.0}, "invalid_request", "n_seq"),
        *(
            ("/v1/reconfigure", {field: lax}, "invalid_request", field)
            for field in ("kv_unified", "dry_run")
            for lax in LAX
        ),
        *(
            ("/v1/up", UP | {"spec": ENGINE | given}, "invalid_request", f"spec.{field}")
            for field, given in (
                *(("kv_unified", {"kv_unified": "on"}), ("kv_unified", {"kv_unified": 1})),
                *(("port", {"port": "8080"}), ("port", {"port": 8080.0})),
                *(("host", {"host": 2130706433}), ("model", {"model": 7})),
                *(("extra_args", {"extra_args": "--x"}), ("api_key_file", {"api_key_file": 7})),
                ("extra_args.0", {"extra_args": [7]}),
            )
        ),
        ("/v1/reconfigure", {"n_seq": 257}, "invalid_geometry", "n_seq"),
        ("/v1/reconfigure", {"n_cxt": 1}, "invalid_request", "n_cxt"),
        ("/v1/reconfigure", [], "invalid_request", "body"),
        ("/v1/pages/out", {"name": "fox"}, "invalid_request", "slot"),
        ("/v1/pages/in", {"name": "fox", "slot": -1}, "invalid_request", "slot"),
        ("/v1/pages/out", {"name": "fox", "slot": 256}, "invalid_request", "slot"),
        ("/v1/pages/out", {"name": "fox", "slot": "0"}, "invalid_request", "slot"),
        ("/v1/pages/out", {"name": "x" * 513, "slot": 0}, "invalid_request", "name"),
        ("/v1/pages/drop", {"name": "fox", "slot": 0}, "invalid_request", "slot"),
        ("/v1/pages/spill", {"filename": "b"}, "invalid_request", "name"),
        ("/v1/pages/spill", {"name": "fox", "slot": 0}, "invalid_request", "slot"),
        ("/v1/pages/save", {"filename": "b", "slot": 1.0}, "invalid_request", "slot"),
        ("/v1/pages/spill", {"name": "fox", "drop": 1}, "invalid_request", "drop"),
        ("/v1/pages/spill", {"name": "fox", "drop": "yes"}, "invalid_request", "drop"),
        ("/v1/pages/spill", {"name": "x", "filename": 7}, "invalid_request", "filename"),
        ("/v1/pages/save", {"filename": "b"}, "invalid_request", "slot"),
        ("/v1/pages/save", {"filename": "x" * 513, "slot": 0}, "invalid_request", "filename"),
        ("/v1/pages/restore", {"slot": 0}, "invalid_request", "filename"),
        ("/v1/pages/restore", {"filename": "b", "slot": 256}, "invalid_request", "slot"),
        ("/v1/apply", {"engine": {"n_ctx": 5}}, "invalid_geometry", "engine.n_ctx"),
        ("/v1/apply", {"engine": {"n_ctx": "big"}}, "invalid_request", "engine.n_ctx"),
        ("/v1/apply", {"engine": {"n_cxt": 5}}, "invalid_request", "engine.n_cxt"),
        ("/v1/up", {}, "invalid_request", "spec"),
        ("/v1/up", UP | {"spec": ENGINE | {"n_seq": 0}}, "invalid_geometry", "spec.n_seq"),
        ("/v1/up", UP | {"engine_path": "e"}, "invalid_request", "engine_path"),
        (
            "/v1/up",
            UP | {"spec": ENGINE | {"extra_args": ["--host", "0.0.0.0"]}},
            "owned_argument",
            "spec.extra_args",
        ),
    ],
)
def test_a_bad_body_is_named(
    daemon: FakeDaemon, path: str, body: object, code: str, field: str
) -> None:
    answer = call(daemon, "POST", path, json=body)
    assert answer.status_code == 400
    found = Problem.model_validate_json(answer.content)
    assert (found.code, found.details["fields"][0]["field"]) == (code, field)
    assert daemon.commands == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/operations/none", 404, "not_found"),
        ("GET", "/v1/operations/none?wait_s=soon", 400, "invalid_request"),
        ("GET", "/v1/operations/none?wait_s=3600", 400, "invalid_request"),
        ("GET", "/v1/logs?lines=-1", 400, "invalid_request"),
        ("GET", "/v1/logs?lines=1.0", 400, "invalid_request"),
        ("GET", "/v1/logs?lines=1_0", 400, "invalid_request"),
        ("GET", "/v1/logs?follow=yes", 400, "invalid_request"),
        ("GET", "/v1/logs?follow=1", 400, "invalid_request"),
        ("POST", "/v1/up?exact=on", 400, "invalid_request"),
        ("GET", "/v1/operations/none?wait_s=1_0", 400, "invalid_request"),
        ("GET", "/v1/operations/none?wait_s=nan", 400, "invalid_request"),
        ("GET", "/v1/ledger?since=1700000000", 400, "invalid_request"),
        ("GET", "/v1/ledger?since=yesterday", 400, "invalid_request"),
        ("GET", "/v1/ledger?since=2026-01-01T00:00:00", 400, "invalid_request"),
        ("GET", "/v1/ledger?limit=10001", 400, "invalid_request"),
        ("GET", "/v1/logs?since=0001-01-01T00:00:00%2B14:00", 400, "invalid_request"),
        ("DELETE", "/v1/up", 405, "method_not_allowed"),
        ("GET", "/v1/pages/drop", 405, "method_not_allowed"),
        ("POST", "/v1/pages/drop", 400, "invalid_request"),
        ("POST", "/v1/up", 400, "invalid_request"),
    ],
)
def test_every_error_has_the_one_shape(
    daemon: FakeDaemon, method: str, path: str, status: int, code: str
) -> None:
    answer = call(daemon, method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert Problem.model_validate_json(answer.content).code == code


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/reconfigure", b"{n_ctx"), ("/v1/pages/drop", b'{"name": "\\udcff"}')],
)
def test_a_body_that_is_no_json_is_named(daemon: FakeDaemon, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = call(daemon, "POST", path, content=body, headers=headers)
    assert answer.status_code == 400
    assert Problem.model_validate_json(answer.content).code == "invalid_request"


@pytest.mark.parametrize("path", ["/v1/up", "/v1/reconfigure", "/v1/pages/drop", "/v1/pages/save"])
@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_a_body_of_another_type_is_415(daemon: FakeDaemon, path: str, sent: str) -> None:
    """A page of another origin may send these without asking."""
    answer = call(daemon, "POST", path, content=b'{"name": "x"}', headers={"Content-Type": sent})
    assert answer.status_code == 415
    problem = Problem.model_validate_json(answer.content)
    assert problem.code == "unsupported_media_type"
    assert sent in problem.message
    assert daemon.commands == []


def test_json_has_more_than_one_name(daemon: FakeDaemon) -> None:
    for sent in ("application/json; charset=utf-8", "application/merge-patch+json"):
        headers = {"Content-Type": sent}
        answer = call(daemon, "POST", "/v1/reconfigure", content=b'{"n_seq": 3}', headers=headers)
        assert answer.status_code == 202, sent


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("DELETE", "/v1/up", "POST"), ("GET", "/v1/pages/drop", "POST"), ("PUT", "/metrics", "GET")],
)
def test_another_method_is_405_with_those_that_there_are(
    daemon: FakeDaemon, method: str, path: str, allowed: str
) -> None:
    answer = call(daemon, method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_what_is_wrong_is_said_in_words_of_json(daemon: FakeDaemon) -> None:
    spec = {"n_ctx": "8192", "n_seq": None, "kv_unified": "yes", "extra_args": "--x", "model": 7}
    bodies: list[Any] = [{"spec": spec, "engine_path": 1.5}, {"spec": []}, [], UP | {"x": 1}]
    for body in bodies:
        answer = call(daemon, "POST", "/v1/up", json=body)
        assert answer.status_code == 400
        said = [field["problem"] for field in answer.json()["details"]["fields"]]
        words = " ".join(said).lower().split()
        assert not {"none", "tuple", "dictionary", "dict", "input", "inputs"} & set(words), said


def test_a_refusal_and_a_bug_have_it_too(daemon: FakeDaemon) -> None:
    daemon.refusal = error("conflict", "another engine is up", hint="down", details={"port": 1})
    answer = call(daemon, "POST", "/v1/stop")
    assert answer.status_code == 409
    assert answer.json() == {
        "code": "conflict",
        "message": "another engine is up",
        "hint": "down",
        "details": {"port": 1},
    }
    daemon.refusal = ZeroDivisionError("hunter2")
    answer = call(daemon, "POST", "/v1/stop")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "hunter2" not in answer.text


def test_the_configuration_is_the_daemons(daemon: FakeDaemon) -> None:
    value = {"read": 1, "running": 2, "after_restart": 3, "takes": "reload", "pinned": None}
    answer = call(daemon, "GET", "/v1/config").json()
    assert answer == {"pid": 1, "file": None, "values": {"n_ctx": value}}


def test_the_ledger_is_asked_for_by_time_and_number(daemon: FakeDaemon) -> None:
    answer = call(daemon, "GET", "/v1/ledger?since=2026-01-01T00:00:00Z&limit=3")
    totals = {"weight_loads": 0, "loads_avoided": 0}
    assert answer.json() == {"lines": [], "totals": totals, "lost": 0, "unreadable": 0}
    assert daemon.asked == (datetime(2026, 1, 1, tzinfo=UTC), 3)


def test_probes(daemon: FakeDaemon) -> None:
    for state in EngineState:
        daemon.state = state
        assert call(daemon, "GET", "/livez").status_code == 200
        ready = state in {EngineState.READY, EngineState.RECONFIGURING}
        assert call(daemon, "GET", "/readyz").status_code == (200 if ready else 503)
    assert "llamactl_weight_loads_total" in call(daemon, "GET", "/metrics").text
    assert call(daemon, "GET", "/v1/logs?lines=7&follow=true").text == "7 True None\n"
    text = call(daemon, "GET", "/v1/logs?since=2026-01-01T00:00:00%2B02:00").text
    assert text == "200 False 2025-12-31 22:00:00+00:00\n"


def test_the_description_knows_only_our_errors(daemon: FakeDaemon) -> None:
    document = call(daemon, "GET", "/openapi.json").json()
    assert document["info"]["version"] == "1.2.3"
    assert "/v1/reconfigure" in document["paths"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
