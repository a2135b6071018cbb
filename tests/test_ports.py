"""A port is free, or somebody has it."""

from __future__ import annotations

import asyncio
import os
import socket

import psutil
import pytest
from llamactl_supervisor import ports
from llamactl_supervisor.errors import LlamactlError
from sandbox import free_port


def problem(host: str, port: int) -> LlamactlError:
    with pytest.raises(LlamactlError) as caught:
        asyncio.run(ports.check_free(host, port))
    return caught.value


def test_a_free_port_is_free() -> None:
    asyncio.run(ports.check_free("127.0.0.1", free_port()))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_is_named(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        found = problem("127.0.0.1", server.getsockname()[1])
    assert found.code == "port_in_use"
    assert found.details["pid"] == os.getpid()
    assert found.details["command"] == psutil.Process().name()


def test_a_listener_that_cannot_be_seen_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(kind: str) -> list[object]:
        assert kind == "tcp"
        return []

    monkeypatch.setattr(psutil, "net_connections", none)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = problem("127.0.0.1", server.getsockname()[1])
    assert "unknown process" in found.message
    assert found.details["pid"] is None


def test_an_address_that_is_not_ours_is_a_bad_request() -> None:
    assert problem("192.0.2.1", free_port()).code == "invalid_request"
