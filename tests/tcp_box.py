"""A sandbox whose daemon listens on TCP as well."""

from __future__ import annotations

import socket
from typing import Any

import httpx
from sandbox import WITHIN_S, Sandbox, free_port, until

ADMIN, READ = "admin-token-of-a-test", "read-token-of-a-test"


class TcpBox(Sandbox):
    """A sandbox whose daemon listens on TCP, with and without a token."""

    def __init__(self) -> None:
        super().__init__(stop_term_s=2)
        self.api_port, self.probes_port = free_port(), free_port()
        self.token_file, self.read_token_file = self.root / "token", self.root / "read-token"
        for path, token in ((self.token_file, ADMIN), (self.read_token_file, READ)):
            path.touch(0o600)
            path.write_text(f"{token}\n")
        self.env |= {
            "LLAMACTL_API_LISTEN": f"127.0.0.1:{self.api_port}",
            "LLAMACTL_API_PROBES_LISTEN": f"127.0.0.1:{self.probes_port}",
            "LLAMACTL_API_TOKEN_FILE": str(self.token_file),
            "LLAMACTL_API_READ_TOKEN_FILE": str(self.read_token_file),
        }

    def ask(
        self, method: str, path: str, token: str | None = ADMIN, **request: Any
    ) -> httpx.Response:
        """Ask over TCP."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers |= request.pop("headers", {})
        url = f"http://127.0.0.1:{self.api_port}{path}"
        return httpx.request(method, url, headers=headers, timeout=WITHIN_S, **request)

    def probe(self, path: str) -> httpx.Response:
        """Ask the listener that asks for no token."""
        return httpx.get(f"http://127.0.0.1:{self.probes_port}{path}", timeout=WITHIN_S)

    def send(self, family: socket.AddressFamily, request: bytes) -> None:
        """Send a request and hang up as soon as the daemon has it."""
        with socket.socket(family) as caller:
            unix = family == socket.AF_UNIX
            caller.connect(str(self.paths.control_socket) if unix else ("127.0.0.1", self.api_port))
            caller.sendall(request)
            until(lambda: self.client.status().operation)
