"""A command line of llama-server that somebody else wrote, turned into a request of ours. Pure."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.fields import DEFAULT_HOST, DEFAULT_PORT, OWNED_ARGS, PORT_MAX
from llamactl_supervisor.models import EngineRequest, UpRequest
from llamactl_supervisor.option_table import KV_UNIFIED, N_CTX, N_SEQ
from llamactl_supervisor.spec import geometry, require_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamactl_supervisor.option_table import ArgsAnswer, Words

_MODEL, _HOST, _PORT, _KEY_FILE = "--model", "--host", "--port", "--api-key-file"
_API_KEY, _HF_TOKEN = "--api-key", "--hf-token"
_TAKEN = frozenset(
    [
        *(N_CTX, N_SEQ, KV_UNIFIED, _MODEL, _HOST, _PORT, _KEY_FILE, _API_KEY, _HF_TOKEN),
        *("--metrics", "--admin-private"),
    ]
)
"""Options that have a place in the request, or that every engine of ours is given anyway."""


@dataclass(frozen=True)
class Foreign:
    """The request; where its clients would look for it; and its secrets, which are not in it.

    `host` and `port` are as they were given: the request itself has the defaults.
    """

    request: UpRequest
    host: str
    port: int
    api_keys: tuple[str, ...]
    hf_token: str | None


def read(engine_path: str, argv: Sequence[str], answer: ArgsAnswer, cwd: str) -> Foreign:
    """Return what the command line `argv` (without its program) asks for.

    `answer` is what that engine itself says of these very arguments: what it refuses never comes
    here, and what its environment and its files add counts as well. `cwd` is where relative paths
    begin. Raises `model_elsewhere` where the model is no file that is named, `owned_argument` for
    an option that would take the engine out of the supervisor's hands, `invalid_geometry`, and
    `invalid_request` for a port that is none.
    """
    require_file(answer)
    taken: dict[str, list[Words]] = {}
    extra: list[str] = []
    for words in answer.words(argv):
        if words.name in _TAKEN:
            taken.setdefault(words.name, []).append(words)
        else:
            _free(words)
            extra += words.words
    model = answer.last(_MODEL)
    if model is None:
        raise error(Code.MODEL_ELSEWHERE, "no model is named", hint="-m FILE names one")
    n_ctx, n_seq, kv_unified = geometry(answer)
    spec: dict[str, Any] = {
        "model": posixpath.join(cwd, model),
        "n_ctx": n_ctx,
        "n_seq": n_seq,
        "kv_unified": kv_unified,
        "extra_args": tuple(extra),
    }
    if _KEY_FILE in taken:
        spec["api_key_file"] = posixpath.join(cwd, taken[_KEY_FILE][-1].words[-1])
    keys = [words.words[-1] for words in taken.get(_API_KEY, ())]
    tokens = [words.words[-1] for words in taken.get(_HF_TOKEN, ())]
    return Foreign(
        request=UpRequest.parse({"spec": EngineRequest.parse(spec), "engine_path": engine_path}),
        host=answer.last(_HOST) or DEFAULT_HOST,
        port=_port(answer.last(_PORT) or str(DEFAULT_PORT)),
        api_keys=tuple(key for listed in keys for key in listed.split(",") if key),
        hf_token=tokens[-1] if tokens else None,
    )


def _port(text: str) -> int:
    """Return what the engine would make a number of in its own way."""
    if text.isascii() and text.isdigit() and int(text) <= PORT_MAX:
        return int(text)
    raise error(Code.INVALID_REQUEST, f"--port {text!r} is no port")


def _free(words: Words) -> None:
    """Refuse an option that the supervisor sets itself and that no field stands for."""
    if words.option is None or not OWNED_ARGS.isdisjoint(words.option.args):
        raise error(
            Code.OWNED_ARGUMENT,
            f"{words.words[0]} cannot be had under supervision",
            hint="name the model's file with -m; see the options of `llamactl up`",
            details={"argument": words.words[0]},
        )
