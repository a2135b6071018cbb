"""What a configuration that makes sense needs of this machine: files, programs, addresses."""

from __future__ import annotations

import os
import socket
from functools import partial
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import keys, preflight, store, tokens
from llamactl_supervisor.api_settings import Address
from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llamactl_supervisor.config import Config, Loaded
    from llamactl_supervisor.models import UpRequest


def problems(loaded: Loaded, built: str | None) -> list[LlamactlError]:
    """Return why a daemon, or its engine, could not go by it here. Touches nothing.

    `built` is the llama-server that is run where nothing names one. Whether a port is free is not
    asked: the daemon that has it may be ours.
    """
    found = []
    for check in _checks(loaded, built):
        try:
            check()
        except LlamactlError as exc:
            found.append(exc)
    return found


def names_engine(config: Config, last: UpRequest | None) -> bool:
    """Say whether the configuration, or else the last engine, names a llama-server."""
    return config.engine.engine_path is not None or last is not None


def require_engine(config: Config, last: UpRequest | None, built: str | None) -> None:
    """Raise `config_invalid` when a model is configured and there is no llama-server for it."""
    if config.engine.model is not None and built is None and not names_engine(config, last):
        raise error(
            Code.CONFIG_INVALID,
            "engine.model is configured, engine.engine_path is not: no llama-server is known",
            hint="`llamactl build` prints the path of one",
        )


def _checks(loaded: Loaded, built: str | None) -> Iterator[Callable[[], object]]:
    config = loaded.config
    engine, api = config.engine, config.api
    for token in (api.token_file, api.read_token_file):
        if token is not None:
            yield partial(tokens.read, token)
    asked = {"api.listen": api.listen, "api.probes_listen": api.probes_listen}
    listens = {name: address for name, address in asked.items() if address is not None}
    for name, address in listens.items():
        yield partial(_of_this_machine, name, address)
    if engine.host is not None and engine.port is not None:
        listens["engine.port"] = Address(engine.host, engine.port)
    for one, other in combinations(listens.items(), 2):
        yield partial(_apart, one, other)
    last = store.peek(loaded.paths.state_file).desired
    yield partial(require_engine, config, last, built)
    if engine.engine_path is not None:
        yield partial(_program, engine.engine_path)
    if engine.model is not None:
        yield partial(preflight.check_model, engine.model)
    if engine.api_key_file is not None:
        yield partial(keys.read, engine.api_key_file)


def _program(path: str) -> None:
    if not (Path(path).is_file() and os.access(path, os.X_OK)):
        raise error(
            Code.INVALID_REQUEST,
            f"engine.engine_path: {path} is no program that this user can run",
            hint="`llamactl build` prints the path of one",
        )


def _of_this_machine(name: str, address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address.host, 0))
    except OSError as exc:
        message = f"{name}: {address.host} cannot be listened on: {exc.strerror or exc}"
        raise error(
            Code.INVALID_REQUEST, message, hint="choose an address of this machine"
        ) from exc


def _apart(one: tuple[str, Address], other: tuple[str, Address]) -> None:
    """Raise where the one would take the other's port from it."""
    (name, address), (second, taken) = one, other
    hosts = [ip_address(each.host) for each in (address, taken)]
    every = any(host.is_unspecified for host in hosts)
    if address.port == taken.port and (every or hosts[0] == hosts[1]):
        message = f"{name} ({address}) and {second} ({taken}) are one port"
        raise error(Code.INVALID_REQUEST, message, hint="give each a port of its own")
