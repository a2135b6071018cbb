"""Which parts of a model a command line leaves to devices that are no processor. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llamactl_supervisor.option_table import ArgsAnswer

_NO_DEVICE, _NOTHING = "none", "0"
_RPC = "--rpc"


class _Part(NamedTuple):
    """What is loaded where `given` is (None: always), and what keeps it in host memory.

    A part without a device of its own follows the model's.
    """

    given: str | None
    amount: str
    device: str


_MODEL = _Part(None, "--n-gpu-layers", "--device")
_PARTS = (
    _MODEL,
    _Part("--spec-draft-model", "--n-gpu-layers-draft", "--spec-draft-device"),
    _Part("--mmproj", "--mmproj-offload", "--mmproj-device"),
)


def asked(answer: ArgsAnswer) -> bool:
    """Whether anything goes to a device that holds weights, if the engine has one.

    llama-server puts there what fits, unless it is told not to: no `-ngl` is `auto`.
    """
    return any(_leaves(part, answer) for part in _PARTS)


def remote(answer: ArgsAnswer) -> bool:
    """Whether devices are named that are another machine's: the engine does not list those."""
    return bool(answer.last(_RPC))


def _leaves(part: _Part, answer: ArgsAnswer) -> bool:
    if part.given is not None and not answer.last(part.given):
        return False
    device = answer.last(part.device) or answer.last(_MODEL.device)
    return device != _NO_DEVICE and answer.last(part.amount) != _NOTHING
