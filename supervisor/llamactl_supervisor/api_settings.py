"""Where the control API listens beside its unix socket, and who may come in there."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from llamactl_supervisor.fields import PORT_MAX, AbsolutePath

LOCALHOST = "localhost"


class Address(NamedTuple):
    """An IP address of this machine, 4 or 6, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ip_address(self.host).is_loopback


def _address(value: object) -> object:
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif host == LOCALHOST:
        host = "127.0.0.1"
    elif ":" in host:
        host = ""
    try:
        if colon and port.isascii() and port.isdigit() and 1 <= int(port) <= PORT_MAX:
            return Address(str(ip_address(host)), int(port))
    except ValueError:
        pass
    text = "must be an IP address of this machine and a port, as 127.0.0.1:9090 or [::1]:9090"
    raise PydanticCustomError("invalid_address", "{text}", {"text": text})


ListenAddress = Annotated[Address, BeforeValidator(_address)]


class ApiSettings(BaseModel):
    """The control API's listeners over TCP: section [api], or LLAMACTL_API_<NAME>. Off by default.

    Whoever may change something there can run programs as this user, so `listen` asks for a token
    wherever it listens: on loopback every user of the machine could come in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: ListenAddress | None = None
    """The whole API, with a bearer token, in clear: there is no TLS."""
    token_file: AbsolutePath | None = None
    """Holds the token for everything; one that others can read lets nobody in."""
    read_token_file: AbsolutePath | None = None
    """Holds a second token, which may look but change nothing."""
    allow_insecure_remote: bool = False
    """Let `listen` be an address that other machines reach, with the token in clear."""
    probes_listen: ListenAddress | None = None
    """/livez, /readyz and /metrics alone, without a token."""

    @model_validator(mode="after")
    def _closed(self) -> Self:
        problem = None
        if self.listen is None and (self.token_file or self.read_token_file):
            problem = "a token file is given but no listen address; set listen, or neither"
        elif self.listen is not None and self.token_file is None:
            problem = (
                f"to listen on {self.listen} needs a token_file, which only its owner can read"
            )
        elif self.listen and not self.listen.is_loopback and not self.allow_insecure_remote:
            problem = (
                f"{self.listen} is reached by other machines, and the token would travel in clear: "
                "listen on loopback behind a proxy with TLS, or set allow_insecure_remote"
            )
        if problem is not None:
            raise PydanticCustomError("open_listener", "{text}", {"text": problem})
        return self
