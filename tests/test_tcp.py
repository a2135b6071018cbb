"""A real daemon over TCP: who is let in, to what, and what becomes of calls that are left."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from typing import TYPE_CHECKING

import httpx
import pytest
from llamactl_supervisor.body_limit import BODY_BYTES_MAX
from llamactl_supervisor.listener import CONNECTIONS_MAX
from llamactl_supervisor.models import EngineState, OperationState, Problem
from sandbox import WITHIN_S, until
from tcp_box import ADMIN, READ, TcpBox

if TYPE_CHECKING:
    from collections.abc import Iterator

REMOTE = {"LLAMACTL_API_LISTEN": "192.0.2.1:9", "LLAMACTL_API_ALLOW_INSECURE_REMOTE": "1"}


@pytest.fixture
def box() -> Iterator[TcpBox]:
    sandbox = TcpBox()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[TcpBox]:
    sandbox = TcpBox()
    sandbox.start()
    yield sandbox
    sandbox.close()


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Return status and code of an answer in the one shape."""
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, Problem.model_validate_json(answer.content).code


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/openapi.json", "/livez", "/nothing"])
def test_nothing_is_answered_without_a_token(shared: TcpBox, path: str) -> None:
    for headers in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer wrong"}):
        answer = shared.ask("GET", path, None, headers=headers)
        assert problem(answer) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert shared.ask("GET", f"{path}?token={ADMIN}", None).status_code == 401
    assert shared.ask("GET", path).status_code == (404 if path == "/nothing" else 200)


def test_the_scopes(shared: TcpBox) -> None:
    assert shared.ask("GET", "/v1/status", READ).status_code == 200
    for path in ("/v1/stop", "/v1/reconfigure", "/v1/pages/drop", "/v1/down", "/nothing"):
        assert problem(shared.ask("POST", path, READ)) == (403, "forbidden")
    assert shared.ask("POST", "/v1/stop").json()["requested_by"].startswith("tcp 127.0.0.1 port ")
    lower = {"Authorization": f"bearer  {ADMIN}"}
    assert shared.ask("GET", "/v1/status", None, headers=lower).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("LOCALHOST:9", 200), ("127.0.0.1", 200), ("127.0.0.1:1", 200)),
        *(("[::1]:80", 200), ("evil.example", 421), ("evil.example:9090", 421), ("", 421)),
        *(("127.0.0.1.evil.example", 421), ("192.0.2.1", 421), ("[::1", 421), ("2130706433", 421)),
    ],
)
def test_another_name_is_refused(shared: TcpBox, host: str, status: int) -> None:
    """A name that a web page had pointed at loopback comes as its own Host."""
    answer = shared.ask("GET", "/v1/status", headers={"Host": host})
    assert answer.status_code == status
    if status == 421:
        assert problem(answer) == (421, "host_refused")


def test_who_is_refused_is_told_before_the_body_is_read(shared: TcpBox) -> None:
    """And the connection does not take the rest of it for the next request."""
    body = b"GET /v1/status HTTP/1.1\r\n\r\n" * 100_000
    address = ("127.0.0.1", shared.api_port)
    with socket.create_connection(address, WITHIN_S) as caller:
        head = "POST /v1/up HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n"
        caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:1000])
        answer = caller.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_no_page_of_another_origin_may_read(shared: TcpBox) -> None:
    answer = shared.ask("GET", "/v1/status", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert shared.ask("OPTIONS", "/v1/status", None).status_code == 401


def test_no_header_makes_another_caller(shared: TcpBox) -> None:
    headers = {"X-Forwarded-For": "192.0.2.7"}
    by = shared.ask("POST", "/v1/stop", headers=headers).json()["requested_by"]
    assert by.startswith("tcp 127.0.0.1 ")


def test_a_token_is_followed_when_its_file_changes(box: TcpBox) -> None:
    box.start()
    box.token_file.write_text("token-of-a-test-too")
    assert box.ask("GET", "/v1/status").status_code == 401
    assert box.ask("GET", "/v1/status", "token-of-a-test-too").status_code == 200
    box.token_file.chmod(0o644)
    assert box.ask("GET", "/v1/status", "token-of-a-test-too").status_code == 401
    assert "is open to others: nobody is let in by it" in box.daemon_log()
    assert box.answers(), "the unix socket needs no token"
    assert f"api listen=127.0.0.1:{box.api_port}" in box.daemon_log()
    assert not [
        token for token in (ADMIN, READ, "token-of-a-test-too") if token in box.daemon_log()
    ]


def test_the_probes_need_no_token_and_are_all_there_is(box: TcpBox) -> None:
    box.start()
    assert (box.probe("/livez").status_code, box.probe("/readyz").status_code) == (200, 503)
    box.up()
    assert (box.probe("/readyz").status_code, box.probe("/readyz").text) == (200, "ready\n")
    assert "llamactl_engine_state" in box.probe("/metrics").text
    for path in ("/v1/status", "/v1/logs", "/openapi.json", "/docs"):
        assert problem(box.probe(path)) == (404, "not_found")
    url = f"http://127.0.0.1:{box.probes_port}/v1/down"
    assert problem(httpx.post(url, timeout=WITHIN_S)) == (404, "not_found")


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"LLAMACTL_API_LISTEN": "0.0.0.0:1"}, 2, "would travel in clear"),
        (REMOTE, 1, "192.0.2.1:9: Cannot assign"),
    ],
)
def test_a_daemon_that_cannot_listen_as_asked_does_not_start(
    box: TcpBox, change: dict[str, str], code: int, said: str
) -> None:
    box.env |= change
    assert box.spawn().wait(WITHIN_S) == code
    assert said in box.daemon_log()
    assert "Traceback" not in box.daemon_log()
    assert not box.paths.control_socket.exists()


@pytest.mark.parametrize("mode", [0o644, 0o000])
def test_a_token_file_gone_bad_leaves_no_engine_without_a_daemon(box: TcpBox, mode: int) -> None:
    first = box.start()
    pid = box.up()
    first.send_signal(signal.SIGUSR2)
    assert first.wait(WITHIN_S) == 0
    box.token_file.write_text("")
    box.token_file.chmod(mode)
    box.start()
    box.until_state(EngineState.READY)
    assert box.engine_pid() == pid
    assert "nobody is let in by it" in box.daemon_log()
    assert box.ask("GET", "/v1/status").status_code == 401
    box.token_file.chmod(0o600)
    box.token_file.write_text(ADMIN)
    assert box.ask("GET", "/v1/status").status_code == 200


def test_a_port_in_use_is_named(box: TcpBox) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", box.probes_port))
        other.listen()
        assert box.spawn().wait(WITHIN_S) == 1
    assert f"cannot listen on 127.0.0.1:{box.probes_port}: Address" in box.daemon_log()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_an_operation_outlives_the_caller_that_hangs_up(
    box: TcpBox, family: socket.AddressFamily
) -> None:
    """Before its answer, and in the middle of a wait for its end."""
    box.start()
    head = f"Host: localhost\r\nAuthorization: Bearer {ADMIN}\r\n".encode()
    body = json.dumps(box.request("--fake-load-s", "1").model_dump(mode="json")).encode()
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    box.send(family, b"POST /v1/up HTTP/1.1\r\n" + head + length + body)
    operation = box.client.status().operation
    assert operation is not None
    assert operation.kind == "up"
    until(lambda: box.client.operation(operation.id).progress == "the engine is starting")
    wait = f"GET /v1/operations/{operation.id}?wait_s=60 HTTP/1.1\r\n".encode()
    box.send(family, wait + head + b"\r\n")
    ended = box.client.wait_operation(operation, timeout_s=WITHIN_S)
    assert ended.state is OperationState.SUCCEEDED
    again = box.ask("GET", f"/v1/operations/{operation.id}").json()
    assert again["result"]["outcome"] == "started"
    assert box.client.status().state is EngineState.READY


def test_idle_connections_do_not_use_the_daemon_up(shared: TcpBox) -> None:
    """Beyond a bound the oldest are dropped; who comes then, and asks, is answered."""
    with contextlib.ExitStack() as held:
        address = ("127.0.0.1", shared.api_port)
        idle = [held.enter_context(socket.create_connection(address, WITHIN_S)) for _ in range(100)]
        until(lambda: sum(map(_dropped, idle)) >= 100 - CONNECTIONS_MAX)
        assert _dropped(idle[0])
        assert not _dropped(idle[-1])
        assert shared.answers()
        assert _answered(shared)


def test_garbage_does_not_fill_the_log(box: TcpBox) -> None:
    box.start()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", box.probes_port), WITHIN_S) as caller:
            caller.sendall(b"no such thing\r\n\r\n")
            assert caller.recv(100).startswith(b"HTTP/1.1 400")
    assert box.daemon_log().count("Invalid HTTP request") == 1


def test_idle_connections_come_and_go(shared: TcpBox) -> None:
    with contextlib.ExitStack() as held:
        address = ("127.0.0.1", shared.api_port)
        for _ in range(CONNECTIONS_MAX):
            held.enter_context(socket.create_connection(address, WITHIN_S))
    until(lambda: _answered(shared))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_is_bounded_on_every_listener(shared: TcpBox, chunked: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(2 * BODY_BYTES_MAX // 2**16):
            yield b" " * 2**16

    def content() -> bytes | Iterator[bytes]:
        return parts() if chunked else b" " * (BODY_BYTES_MAX + 1)

    headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
    unix = httpx.HTTPTransport(uds=str(shared.paths.control_socket))
    for address, transport in (
        (f"http://127.0.0.1:{shared.api_port}", None),
        (f"http://127.0.0.1:{shared.probes_port}", None),
        ("http://llamactl", unix),
    ):
        with httpx.Client(transport=transport, headers=headers, timeout=WITHIN_S) as client:
            answer = client.post(f"{address}/v1/reconfigure", content=content())
            assert problem(answer) == (413, "body_too_large")
            whole = client.post(f"{address}/v1/reconfigure", content=b" " * BODY_BYTES_MAX)
            assert whole.status_code in {400, 404}
    assert shared.answers()


def _dropped(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # once; then it is at its end
        return True


def _answered(box: TcpBox) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return box.ask("GET", "/livez").status_code == 200
    return False
