"""What may listen where: nothing by default, and nothing open by accident."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.config import load
from llamactl_supervisor.errors import LlamactlError

if TYPE_CHECKING:
    from llamactl_supervisor.api_settings import ApiSettings

TOKEN = {"LLAMACTL_API_TOKEN_FILE": "/t"}


def settings_of(env: dict[str, str]) -> ApiSettings:
    """Return the settings that an environment gives, with no file."""
    return load({"XDG_CONFIG_HOME": "/nowhere"} | env).config.api


def test_nothing_listens_unless_asked() -> None:
    settings = settings_of({})
    assert (settings.listen, settings.probes_listen) == (None, None)


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("127.0.0.1:9090", "127.0.0.1", 9090, "127.0.0.1:9090"),
        ("localhost:1", "127.0.0.1", 1, "127.0.0.1:1"),
        ("[::1]:65535", "::1", 65535, "[::1]:65535"),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int, shown: str) -> None:
    listen = settings_of(TOKEN | {"LLAMACTL_API_LISTEN": text}).listen
    assert listen is not None
    assert (listen.host, listen.port, str(listen), listen.is_loopback) == (host, port, shown, True)


@pytest.mark.parametrize(
    "text",
    [
        *("9090", ":9090", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536"),
        *("::1:9090", "example.org:9090", "127.0.0.1:9_0", "127.0.0.1:-1", "[::1]9090", "[]:1"),
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    for name in ("LISTEN", "PROBES_LISTEN"):
        with pytest.raises(LlamactlError) as caught:
            settings_of(TOKEN | {f"LLAMACTL_API_{name}": text})
        assert caught.value.code == "invalid_request"
        assert f"LLAMACTL_API_{name}={text!r}: must be an IP address" in caught.value.message


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"LLAMACTL_API_LISTEN": "127.0.0.1:9090"}, "needs a token_file"),
        (TOKEN, "no listen address"),
        ({"LLAMACTL_API_READ_TOKEN_FILE": "/r"}, "no listen address"),
        (TOKEN | {"LLAMACTL_API_LISTEN": "0.0.0.0:9090"}, "would travel in clear"),
        (TOKEN | {"LLAMACTL_API_LISTEN": "[::]:9090"}, "would travel in clear"),
        (TOKEN | {"LLAMACTL_API_LISTEN": "192.0.2.1:9090"}, "would travel in clear"),
        (
            {"LLAMACTL_API_LISTEN": "0.0.0.0:1", "LLAMACTL_API_ALLOW_INSECURE_REMOTE": "1"},
            "needs a token_file",
        ),
    ],
)
def test_an_open_listener_is_refused(env: dict[str, str], problem: str) -> None:
    with pytest.raises(LlamactlError) as caught:
        settings_of(env)
    assert (caught.value.code, problem in caught.value.message) == ("invalid_request", True)


def test_remote_takes_a_token_and_the_word() -> None:
    env = {"LLAMACTL_API_LISTEN": "0.0.0.0:9090", "LLAMACTL_API_ALLOW_INSECURE_REMOTE": "true"}
    assert str(settings_of(TOKEN | env).listen) == "0.0.0.0:9090"
    probes = settings_of({"LLAMACTL_API_PROBES_LISTEN": "0.0.0.0:9091"})
    assert str(probes.probes_listen) == "0.0.0.0:9091"
