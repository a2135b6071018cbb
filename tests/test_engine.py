"""Whatever answers on the private socket, we make sense of it or say that there is none."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from llamactl_supervisor import engine
from llamactl_supervisor import events as ev
from llamactl_supervisor.engine import EngineClient
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.events import EngineFacts, EngineProcess
from llamactl_supervisor.models import (
    EngineLook,
    OperationKind,
    ProcessIdentity,
    ReconfigureRequest,
)
from sandbox import WITHIN_S

GEOMETRY = {"n_ctx": 16384, "n_seq": 2, "from_tomorrow": 1}
PROPS = {"instance_id": "abc", "context_geometry": GEOMETRY, "n_weight_loads": 1, "total_slots": 2}
PAGE = ev.Page("o", OperationKind.PAGE_OUT, "a b/ä&page=x\0", 1)
CHANGE = ReconfigureRequest(n_ctx=131072)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

_T = TypeVar("_T")
_Call = Callable[[EngineClient], Awaitable[_T]]


def http(status: int, body: object) -> bytes:
    """Return an answer in bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


def ask(
    call: _Call[_T],
    answers: dict[str, bytes],
    pid: int | None = None,
    bodies: list[Any] | None = None,
) -> _T:
    """Serve raw `answers` by path, and let the client ask; JSON that it sends goes to `bodies`."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        if bodies is not None:
            size = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
            bodies.append(json.loads(await reader.readexactly(int(size.split()[1]))))
        answer = answers[head.split()[1].decode()]
        if not answer:
            await reader.read()  # silence, until the client hangs up
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def scenario() -> _T:
        with tempfile.TemporaryDirectory(prefix="llamactl-") as directory:
            path = Path(directory) / "engine.sock"
            identity = ProcessIdentity(pid=pid or os.getpid(), start_ticks=1, boot_id="b")
            process = EngineProcess(instance_id="abc", engine=identity, holder=None)
            client = EngineClient(process, path, "k3y")
            async with await asyncio.start_unix_server(serve, path):
                try:
                    return await call(client)
                finally:
                    await client.close()
                    assert all(b"Authorization: Bearer k3y" in head for head in seen)

    return asyncio.run(scenario())


def problem(call: _Call[Any], answers: dict[str, bytes], pid: int | None = None) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        ask(call, answers, pid)
    return caught.value


def facts(client: EngineClient) -> Awaitable[EngineFacts | None]:
    return client.facts()


def reconfigure(client: EngineClient) -> Awaitable[Any]:
    return client.reconfigure(CHANGE)


def test_a_healthy_engine_tells_its_geometry() -> None:
    found = ask(facts, {"/health": OK, "/props": http(200, PROPS)})
    assert found is not None
    assert found.geometry is not None
    assert (found.geometry.n_ctx, found.n_weight_loads) == (16384, 1)


def test_a_loading_engine_is_not_healthy_yet() -> None:
    assert ask(facts, {"/health": http(503, {"error": {"message": "Loading model"}})}) is None


def test_nobody_there_is_no_word_of_the_engine() -> None:
    async def scenario() -> None:
        identity = ProcessIdentity(pid=1, start_ticks=1, boot_id="b")
        process = EngineProcess(instance_id="abc", engine=identity, holder=None)
        client = EngineClient(process, Path("/nowhere/engine.sock"), None)
        try:
            await client.facts()
        finally:
            await client.close()

    with pytest.raises(LlamactlError) as caught:
        asyncio.run(scenario())
    assert caught.value.code == "engine_socket_gone"
    assert "/nowhere/engine.sock: No such file or directory" in caught.value.message


def test_an_engine_that_was_seen_to_end_is_asked_no_more() -> None:
    async def asked_too_late(client: EngineClient) -> None:
        await client.close()
        await client.props()

    gone = problem(asked_too_late, {})
    assert (gone.code, gone.message) == (
        "engine_unreachable",
        f"the engine is gone (pid {os.getpid()})",
    )


async def quiesce(client: EngineClient) -> Any:
    return await client.quiesce(is_quiet=True, cut=True, timeout_s=WITHIN_S)


def test_the_demand_to_be_quiet_is_answered_declined_or_not_known() -> None:
    counts = {"is_quiet": True, "n_processing": 0, "n_waiting": 3, "n_cut": 2, "newer": 1}
    bodies: list[Any] = []
    told = ask(quiesce, {"/quiesce": http(200, counts)}, bodies=bodies)
    assert (told.n_waiting, told.n_cut) == (3, 2)
    assert bodies == [{"is_quiet": True, "cut": True}]
    assert ask(quiesce, {"/quiesce": http(404, {"error": {"code": 404}})}) is None
    assert problem(quiesce, {"/quiesce": http(200, {})}).code == "engine_answer_broken"


def test_another_process_on_the_socket_is_not_our_engine() -> None:
    found = problem(facts, {"/health": OK, "/props": http(200, PROPS)}, pid=os.getppid())
    assert found.code == "engine_unproven"
    assert f"pid {os.getpid()}" in found.message


def test_another_instance_is_not_our_engine() -> None:
    props = http(200, PROPS | {"instance_id": "somebody-else"})
    assert problem(facts, {"/health": OK, "/props": props}).code == "engine_unproven"


@pytest.mark.parametrize(
    "answer",
    [
        http(200, b"<html>"),
        http(200, b""),
        http(200, {"context_geometry": {"n_ctx": "many"}}),
        http(401, {"error": {"message": "Invalid API Key"}}),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_a_broken_answer_is_typed(answer: bytes) -> None:
    found = problem(facts, {"/health": OK, "/props": answer})
    assert found.code == "engine_answer_broken"
    assert "/props" in found.message


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ANSWER_BYTES_MAX", 1000)
    answer = http(200, b" " * 100_000)
    assert problem(facts, {"/health": OK, "/props": answer}).code == "engine_answer_broken"


def test_a_refusal_keeps_its_reason_and_its_numbers() -> None:
    body = {
        "code": 409,
        "type": "reconfigure_refused",
        "reason": "insufficient_memory",
        "message": "needs 2 bytes, has 1",
        "details": {"bytes_needed": 2, "bytes_available": 1},
    }
    found = problem(reconfigure, {"/reconfigure": http(409, {"error": body})})
    assert (found.code, found.message) == ("insufficient_memory", "needs 2 bytes, has 1")
    assert found.details["bytes_available"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        http(200, {"outcome": "applied"}),
        http(200, {"outcome": "perhaps", "previous": GEOMETRY, "geometry": GEOMETRY}),
        http(404, {"error": {"code": 404, "message": "File Not Found"}}),
        http(500, b"oops"),
    ],
)
def test_an_answer_that_is_neither_receipt_nor_refusal_is_broken(answer: bytes) -> None:
    assert problem(reconfigure, {"/reconfigure": answer}).code == "engine_answer_broken"


PAGE_PATH = "/slots/1?action=page_out&page=a+b%2F%C3%A4%26page%3Dx%00"


def page(client: EngineClient) -> Awaitable[Any]:
    return client.page(PAGE)


def test_a_page_name_is_quoted_and_its_receipt_kept() -> None:
    receipt = {"id_slot": 1, "page": "x", "n_tokens": 40, "n_bytes": 9, "from_tomorrow": 1}
    found = ask(page, {PAGE_PATH: http(200, receipt)})
    assert (found.n_tokens, found.model_dump()["from_tomorrow"]) == (40, 1)


@pytest.mark.parametrize(
    ("reason", "code"), [("unknown_page", "unknown_page"), ("moon_phase", "page_refused")]
)
def test_a_page_that_is_refused_keeps_the_reason(reason: str, code: str) -> None:
    body = {"code": 404, "type": "page_refused", "reason": reason, "message": "there is no page"}
    found = problem(page, {PAGE_PATH: http(404, {"error": body | {"details": {"slot": 1}}})})
    assert (found.code, found.exit_code, found.message) == (code, 5, "there is no page")
    assert found.details == {"slot": 1, "reason": reason}


NAME = 'a b/ä&page=x\0"'
FILE_VERBS = {
    "/slots/0?action=spill&page=a+b%2F%C3%A4%26page%3Dx%00%22": ev.PageFile(
        "o", OperationKind.PAGE_SPILL, NAME, page=NAME, drop=True
    ),
    "/slots/3?action=save": ev.PageFile("o", OperationKind.PAGE_SAVE, NAME, 3),
    "/slots/2?action=restore": ev.PageFile("o", OperationKind.PAGE_RESTORE, NAME, 2),
}
WRITTEN = {"id_slot": 3, "filename": "x", "n_tokens": 40, "n_bytes": 9, "from_tomorrow": 1}


@pytest.mark.parametrize(("path", "command"), FILE_VERBS.items())
def test_a_file_name_travels_in_the_body_and_a_page_name_quoted(
    path: str, command: ev.PageFile
) -> None:
    bodies: list[Any] = []
    answers = {path: http(200, WRITTEN)}
    found = ask(lambda client: client.page_file(command), answers, bodies=bodies)
    assert (found.filename, found.model_dump()["from_tomorrow"]) == ("x", 1)
    drop = {"drop": True} if command.page is not None else {}
    assert bodies == [{"filename": NAME} | drop]


def test_a_verb_with_files_that_is_refused_keeps_the_reason_and_what_differs() -> None:
    path, command = next(iter(FILE_VERBS.items()))
    differs = [{"field": "model", "page": "a", "server": ""}]
    body = {"code": 409, "type": "page_refused", "reason": "page_mismatch", "message": "no: a"}
    answer = http(409, {"error": body | {"details": {"slot": 1, "fields": differs}}})
    found = problem(lambda client: client.page_file(command), {path: answer})
    assert (found.code, found.exit_code, found.message) == ("page_mismatch", 5, "no: a")
    assert found.details == {"slot": 1, "fields": differs, "reason": "page_mismatch"}


def test_an_engine_without_a_directory_for_files_says_so() -> None:
    path, command = next(iter(FILE_VERBS.items()))
    body = {"code": 501, "type": "not_supported_error", "message": "start it with a directory"}
    found = problem(lambda client: client.page_file(command), {path: http(501, {"error": body})})
    assert (found.code, found.message) == ("not_supported", "start it with a directory")


@pytest.mark.parametrize(
    "body",
    [
        {"id_slot": 0, "page": "x", "n_tokens": 1, "n_bytes": 1},
        WRITTEN | {"lost": [{"file": "x.ckpt"}]},
        WRITTEN | {"dropped": "perhaps"},
        [],
    ],
)
def test_a_receipt_that_names_no_files_is_broken(body: object) -> None:
    path, command = next(iter(FILE_VERBS.items()))
    found = problem(lambda client: client.page_file(command), {path: http(200, body)})
    assert found.code == "engine_answer_broken"


@pytest.mark.parametrize("path", ["/pages", "/slots"])
def test_a_list_that_is_none_is_broken(path: str) -> None:
    def read(client: EngineClient) -> Awaitable[Any]:
        return client.pages() if path == "/pages" else client.slots()

    props = {"/props": http(200, PROPS)}
    assert not any(ask(read, props | {path: http(200, [])}).model_dump().values())
    bodies: tuple[object, ...] = (b"[", {"pages": []}, [{"name": "fox"}])
    for body in bodies:
        assert problem(read, props | {path: http(200, body)}).code == "engine_answer_broken"
    body = {"code": 501, "type": "not_supported_error", "message": "start it with --slots"}
    refused = problem(read, props | {path: http(501, {"error": body})})
    assert (refused.code, refused.message) == ("not_supported", "start it with --slots")


def test_an_engine_that_does_not_say_its_slots_is_not_asked_for_them() -> None:
    """Being asked would wake it, for nothing but this answer."""
    silent = PROPS | {"endpoint_slots": False, "is_sleeping": True}
    found = problem(lambda client: client.slots(), {"/props": http(200, silent), "/slots": b""})
    assert found.code == "not_supported"
    assert "--no-slots" in found.message


def test_calls_that_wait_keep_no_other_from_being_sent() -> None:
    """More reads than httpx has connections for by default wait for the engine's turn."""
    many = 101

    async def scenario() -> None:
        turn, waiting = asyncio.Event(), asyncio.Semaphore(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"GET /slots" in await reader.readuntil(b"\r\n\r\n"):
                waiting.release()
                await turn.wait()
                writer.write(http(200, []))
            else:
                writer.write(http(200, PROPS))
            await writer.drain()
            writer.close()

        with tempfile.TemporaryDirectory(prefix="llamactl-") as directory:
            path = Path(directory) / "engine.sock"
            identity = ProcessIdentity(pid=os.getpid(), start_ticks=1, boot_id="b")
            process = EngineProcess(instance_id="abc", engine=identity, holder=None)
            client = EngineClient(process, path, None)
            async with await asyncio.start_unix_server(serve, path, backlog=many):
                reads = [asyncio.create_task(client.slots()) for _ in range(many)]
                try:
                    for _ in range(many - 1):
                        await waiting.acquire()
                    assert (await client.props()).n_weight_loads == 1
                finally:
                    turn.set()
                    await asyncio.gather(*reads, return_exceptions=True)
                    await client.close()

    asyncio.run(scenario())


SLOT = {"id": 0, "n_ctx": 8192, "is_processing": True, "n_prompt_tokens": 40}
FOX = {"name": "fox", "n_tokens": 7, "n_bytes": 7168}


def look(**answers: bytes) -> EngineLook:
    paths = {"/props": http(200, PROPS), "/pages": http(200, [FOX])}
    paths |= {f"/{name}": answer for name, answer in answers.items()}
    return ask(lambda client: asyncio.wait_for(client.look(), WITHIN_S), paths)


def test_a_look_takes_the_slots_without_their_requests() -> None:
    slots = http(200, [SLOT | {"params": {"seed": 1}, "prompt": "what a user typed"}])
    found = look(slots=slots)
    assert found.model_dump(mode="json", exclude_unset=True) == {
        "asleep": False,
        "slots": [SLOT],
        "pages": [FOX],
    }


def test_a_look_wakes_no_sleeping_engine() -> None:
    """Here it would be answered by nobody, and fail."""
    found = look(props=http(200, PROPS | {"is_sleeping": True}))
    assert (found.asleep, found.slots, found.problem) == (True, None, None)
    assert [page.name for page in found.pages] == ["fox"]


def test_a_look_does_not_wait_for_a_long_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOOK_S", 0.05)
    found = look(slots=b"")
    assert found.slots is None
    assert found.problem is not None
    assert found.problem.code == "engine_unreachable"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (http(501, {"error": {"type": "not_supported_error", "message": "no"}}), "not_supported"),
        (http(200, b"[{}]"), "engine_answer_broken"),
    ],
)
def test_a_look_without_slots_says_why(answer: bytes, code: str) -> None:
    found = look(slots=answer)
    assert found.slots is None
    assert found.problem is not None
    assert found.problem.code == code
    assert [page.name for page in found.pages] == ["fox"]
