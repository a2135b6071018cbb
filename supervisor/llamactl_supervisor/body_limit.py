"""How much a request may carry, over whichever listener it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl_supervisor.control import problem_response
from llamactl_supervisor.errors import Code, error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 2**20


class BodyLimit:
    """The application behind a bound: it sees a body when the whole of it is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, connection: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `body_too_large` (413) as soon as it is known to be."""
        length = dict(connection["headers"]).get(b"content-length", b"0")
        too_large, body, last = int(length) > BODY_BYTES_MAX, bytearray(), False
        while not (too_large or last):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            last = not message.get("more_body", False)
            too_large = len(body) > BODY_BYTES_MAX
        if too_large:
            problem = error(
                Code.BODY_TOO_LARGE, f"the request's body has more than {BODY_BYTES_MAX} bytes"
            )
            await problem_response(problem, {"Connection": "close"})(connection, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(connection, replay, send)
