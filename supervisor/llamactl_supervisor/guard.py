"""Who is let in over TCP: the right host name, a token, and nothing more than it is good for."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

from llamactl_supervisor.api_settings import LOCALHOST
from llamactl_supervisor.control import problem_response
from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.tokens import Scope

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as Connection

    from llamactl_supervisor.api_settings import Address
    from llamactl_supervisor.errors import LlamactlError
    from llamactl_supervisor.tokens import Tokens

READS = frozenset(["GET", "HEAD"])
_BEARER = b"bearer "


class Guard:
    """The application as TCP sees it. What is refused never reaches it, nor is its body read."""

    def __init__(self, app: ASGIApp, address: Address, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens
        self._listen = ip_address(address.host)

    async def __call__(self, connection: Connection, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers: dict[bytes, bytes] = dict(connection["headers"])
        host, port = connection["client"] or ("unknown", 0)
        connection["client"] = (f"tcp {host} port {port}", port)
        problem = self._problem(connection["method"], headers)
        if problem is None:
            await self._app(connection, receive, send)
            return
        challenge = {"WWW-Authenticate": "Bearer"} if problem.code == Code.UNAUTHORIZED else {}
        await problem_response(problem, challenge)(connection, receive, send)

    def _problem(self, method: str, headers: dict[bytes, bytes]) -> LlamactlError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            return error(
                Code.HOST_REFUSED,
                f"Host {host!r} is not the address that is listened on",
                hint="ask by address: another name may be a web page that had its own pointed here",
            )
        given = headers.get(b"authorization", b"")
        is_bearer = given[: len(_BEARER)].lower() == _BEARER
        scope = self._tokens.scope(given[len(_BEARER) :].strip()) if is_bearer else None
        if scope is None:
            what = "the token is none of ours" if is_bearer else "a bearer token is needed"
            hint = "Authorization: Bearer TOKEN, with the content of the daemon's token file"
            return error(Code.UNAUTHORIZED, what, hint=hint)
        if scope is Scope.READ and method not in READS:
            return error(
                Code.FORBIDDEN,
                f"{method} changes something, and this token is for reading",
                hint="use the token of token_file",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether the Host header names the address that is listened on, by whatever port.

        A tunnel ends at another port. Names other than localhost are never ours: any name can be
        pointed at us by whoever owns it.
        """
        name, bracket, _ = host.partition("]") if host.startswith("[") else host.partition(":")
        name = name[1:] if bracket == "]" else name
        try:
            asked = None if name.lower() == LOCALHOST else ip_address(name)
        except ValueError:
            return False
        if self._listen.is_unspecified:
            return True
        if asked is None or asked.is_loopback:
            return self._listen.is_loopback
        return asked == self._listen
