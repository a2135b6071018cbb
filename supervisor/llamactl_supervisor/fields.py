"""What a value in a request may be: bounds, path rules, the engine options nobody else may set."""

from __future__ import annotations

import json
import re
from ipaddress import AddressValueError, IPv4Address
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, WrapValidator
from pydantic_core import PydanticCustomError

from llamactl_supervisor.errors import Code, LlamactlError, error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

N_CTX_MIN = 256
"""Smallest total context in tokens: what a slot is rounded up to; an engine begins with no less."""
N_CTX_MAX = 2**31 - 1
"""Largest total context in tokens: llama.cpp counts cells in a signed 32-bit integer."""
N_SEQ_MAX = 256
"""Most slots: LLAMA_MAX_SEQ of the pinned llama.cpp."""
PORT_MAX = 65535
ARGS_MAX = 512
"""Most words of a command line."""
CPUS_MAX = 8192
ENV_MAX = 200
"""Most variables that a caller's environment adds to the engine's."""
PAGE_NAME_MAX = 512
"""Most characters of a page's or file's name that the engine is given to judge; it allows fewer."""

TOKENS_PER = {"": 1, "k": 1024, "m": 1024**2}

AUTO = "auto"
"""The n_ctx that the engine chooses as it starts: the model's own, or what its memory allows."""
DEFAULT_N_CTX = 16384
DEFAULT_N_SEQ = 2
DEFAULT_PORT = 8080
DEFAULT_HOST = "127.0.0.1"

_FIELD_ARGS = {
    "model": ("-m", "--model"),
    "n_ctx": ("-c", "--ctx-size"),
    "n_seq": ("-np", "--parallel"),
    "kv_unified": ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
    "host": ("--host",),
    "port": ("--port",),
    "api_key_file": ("--api-key-file",),
}
_FIELD_OF = {arg: field for field, args in _FIELD_ARGS.items() for arg in args}
OWNED_ARGS = frozenset(
    [
        *_FIELD_OF,
        *("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"),
        *("-dr", "--docker-repo", "--models-dir", "--models-preset"),
        *("--reuse-port", "--api-prefix", "--instance-id", "--admin-private", "--metrics"),
        "--quiesced",
    ]
)
"""Engine options that the supervisor sets itself, in every spelling of the pinned llama-server."""
OWNED_ENV = frozenset(
    f"LLAMA_ARG_{name}"
    for name in (
        *("MODEL", "MODEL_URL", "HF_REPO", "HF_FILE", "DOCKER_REPO", "MODELS_DIR"),
        *("MODELS_PRESET", "CTX_SIZE", "N_PARALLEL", "KV_UNIFIED", "NO_KV_UNIFIED"),
        *("HOST", "PORT", "REUSE_PORT", "API_PREFIX", "ENDPOINT_METRICS"),
    )
)
"""Variables by which llama-server takes the same options. Keys are another matter: they add up."""
NO_SERVER_ARGS = frozenset(
    [
        *("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices"),
        *("--completion-bash", "--print-args-json", "--print-memory-json"),
    ]
)
"""Engine options with which it says something and ends."""
SECRET_ARGS = frozenset(["--api-key", "-hft", "--hf-token"])
"""Engine options whose value is a secret: an argument is readable by every user of the machine."""


_PROBLEMS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is no field of this",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "missing": "is missing",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "tuple_type": "must be an array",
}
"""What pydantic says in Python's words, by its types, in those of JSON and TOML."""


def written(value: Any) -> str:
    """Return a value as JSON writes it, and TOML nearly so; `absent` where there is none."""
    return "absent" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def problem(found: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors says, in the words of the one who wrote the value."""
    return _PROBLEMS.get(found["type"]) or str(found["msg"])


def validation_error(found: Sequence[Any]) -> LlamactlError:
    """Map pydantic's error list to one error: code of the first, all of them in `details`."""
    fields = [
        {"field": ".".join(str(part) for part in item["loc"] if part != "body") or "body"}
        | {"problem": problem(item)}
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


def _or_auto(value: Any, _: Any) -> Any:
    """Check as one value, not as one of two: a union would tell of both at every mistake."""
    return value if value == AUTO else _N_CTX.validate_python(value)


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


def unheard_message(name: str) -> str:
    """Return what to tell of one of `OWNED_ENV` that is set."""
    return f"{name} is kept from the engine: llamactl sets that itself"


def option_name(arg: str) -> str:
    """Return an engine option's name as it is listed here, whatever spelling `arg` has."""
    name = arg.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _instead(name: str) -> str:
    field = _FIELD_OF.get(name)
    if field is None:
        return "and nothing else may set it"
    return f"from engine.{field} or the option of `up` for it"


def _free_args(args: tuple[str, ...]) -> tuple[str, ...]:
    for arg in args:
        name = option_name(arg)
        if "\0" in arg:
            raise PydanticCustomError("invalid_argument", "an argument holds a NUL byte")
        if name in OWNED_ARGS:
            text = f"{name} is set by the supervisor, {_instead(name)}"
            raise PydanticCustomError("owned_argument", "{text}", {"text": text})
        if name in NO_SERVER_ARGS:
            text = f"{name} starts no server: llama-server says something and ends"
            raise PydanticCustomError("invalid_argument", "{text}", {"text": text})
        if name in SECRET_ARGS:
            text = f"{name} would put a secret on the command line; use api_key_file or a file"
            raise PydanticCustomError("owned_argument", "{text}", {"text": text})
    return args


NCtx = Annotated[int, Field(strict=True), _bounded("n_ctx", "tokens", N_CTX_MIN, N_CTX_MAX)]
_N_CTX: TypeAdapter[int] = TypeAdapter(NCtx)
RequestedCtx = Annotated[int | Literal["auto"], WrapValidator(_or_auto)]
"""An n_ctx that an engine starts with; only a number can be asked for live."""
NSeq = Annotated[int, Field(strict=True), _bounded("n_seq", "slots", 1, N_SEQ_MAX)]
Slot = Annotated[int, Field(strict=True, ge=0, lt=N_SEQ_MAX)]
PageName = Annotated[str, Field(max_length=PAGE_NAME_MAX)]
FileName = Annotated[str, Field(max_length=PAGE_NAME_MAX)]
AbsolutePath = Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
ExtraArgs = Annotated[tuple[str, ...], Field(max_length=ARGS_MAX), AfterValidator(_free_args)]
Host = Annotated[str, AfterValidator(_ipv4)]
EnvName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=131072)]
CpuNumber = Annotated[int, Field(strict=True, ge=0, lt=CPUS_MAX)]
Rlimit = Literal["AS", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "RTPRIO", "STACK"]
"""Limits that a process has from its caller and that an engine feels."""
Port = Annotated[int, Field(strict=True, ge=1, le=PORT_MAX)]
