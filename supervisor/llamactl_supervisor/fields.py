"""What a value in a request may be: bounds, path rules, the engine options nobody else may set."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Sequence

N_CTX_MIN = 256
"""Smallest total context in tokens: what a slot is rounded up to; an engine begins with no less."""
N_CTX_MAX = 2**31 - 1
"""Largest total context in tokens: llama.cpp counts cells in a signed 32-bit integer."""
N_SEQ_MAX = 256
"""Most slots: LLAMA_MAX_SEQ of the pinned llama.cpp."""
PORT_MAX = 65535
PAGE_NAME_MAX = 512
"""Most characters of a page's or file's name that the engine is given to judge; it allows fewer."""

TOKENS_PER = {"": 1, "k": 1024, "m": 1024**2}

DEFAULT_N_CTX = 16384
DEFAULT_N_SEQ = 2
DEFAULT_PORT = 8080
DEFAULT_HOST = "127.0.0.1"

OWNED_ARGS = frozenset(
    [
        *("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"),
        *("-dr", "--docker-repo", "--models-dir", "--models-preset"),
        *("-c", "--ctx-size", "-np", "--parallel"),
        *("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
        *("--host", "--port", "--reuse-port", "--api-prefix", "--api-key-file"),
        *("--instance-id", "--admin-private", "--metrics"),
    ]
)
"""Engine options that the supervisor sets itself, in every spelling of the pinned llama-server."""
SECRET_ARGS = frozenset(["--api-key", "-hft", "--hf-token"])
"""Engine options whose value is a secret: an argument is readable by every user of the machine."""


def validation_error(found: Sequence[Any]) -> LlamactlError:
    """Map pydantic's error list to one error: code of the first, all of them in `details`."""
    fields = [
        {"field": ".".join(str(part) for part in item["loc"] if part != "body") or "body"}
        | {"problem": item["msg"]}
        for item in found
    ]
    kind = found[0]["type"]
    code = kind if kind in {Code.INVALID_GEOMETRY, Code.OWNED_ARGUMENT} else Code.INVALID_REQUEST
    message = f"{fields[0]['field']}: {fields[0]['problem']}"
    return error(code, message, details={"fields": fields})


def parse_tokens(text: str) -> int | None:
    """Return how many tokens `text` says, `128k` is 131072, `1m` is 1048576; None for none."""
    found = re.fullmatch(r"([0-9]{1,18})([kKmM]?)", text)
    return int(found[1]) * TOKENS_PER[found[2].lower()] if found else None


def _bounded(name: str, unit: str, least: int, most: int) -> AfterValidator:
    def check(value: int) -> int:
        if not least <= value <= most:
            text = f"must be a number of {unit} from {least} to {most}, not {value}"
            raise PydanticCustomError("invalid_geometry", "{text}", {"text": text, "field": name})
        return value

    return AfterValidator(check)


def _absolute(value: str) -> str:
    if not PurePosixPath(value).is_absolute() or "\0" in value:
        text = f"must be an absolute path, not {value!r}"
        raise PydanticCustomError("invalid_path", "{text}", {"text": text})
    return value


def _ipv4(value: str) -> str:
    try:
        return str(IPv4Address(value))
    except AddressValueError:
        text = f"must be an IPv4 address of this machine, not {value!r}"
        raise PydanticCustomError("invalid_host", "{text}", {"text": text}) from None


def option_name(arg: str) -> str:
    """Return an engine option's name as it is listed here, whatever spelling `arg` has."""
    name = arg.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _free_args(args: tuple[str, ...]) -> tuple[str, ...]:
    for arg in args:
        name = option_name(arg)
        if "\0" in arg:
            raise PydanticCustomError("invalid_argument", "an argument holds a NUL byte")
        if name in OWNED_ARGS:
            text = f"{name} is set by the supervisor; use the field or flag for it instead"
            raise PydanticCustomError("owned_argument", "{text}", {"text": text})
        if name in SECRET_ARGS:
            text = f"{name} would put a secret on the command line; use api_key_file or a file"
            raise PydanticCustomError("owned_argument", "{text}", {"text": text})
    return args


NCtx = Annotated[int, Field(strict=True), _bounded("n_ctx", "tokens", N_CTX_MIN, N_CTX_MAX)]
NSeq = Annotated[int, Field(strict=True), _bounded("n_seq", "slots", 1, N_SEQ_MAX)]
Slot = Annotated[int, Field(strict=True, ge=0, lt=N_SEQ_MAX)]
PageName = Annotated[str, Field(max_length=PAGE_NAME_MAX)]
FileName = Annotated[str, Field(max_length=PAGE_NAME_MAX)]
AbsolutePath = Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
ExtraArgs = Annotated[tuple[str, ...], Field(max_length=512), AfterValidator(_free_args)]
Host = Annotated[str, AfterValidator(_ipv4)]
Port = Annotated[int, Field(strict=True, ge=1, le=PORT_MAX)]
