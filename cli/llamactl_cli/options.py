"""How a value is written on the command line: spellings, and bounds that need no daemon.

What breaks a bound is a usage error (exit 2) that names the range; what the daemon or the engine
declines is refused (exit 5).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

LOG_LINES_MAX = 100_000
LEDGER_LINES_MAX = 10_000
TIMEOUT_S_MAX = 7 * 24 * 3600.0
PAGE_DAYS_MAX = 36500
PAGE_DAYS = 30
"""How long damaged pages are kept."""


def tokens(text: str) -> int:
    """Return a number of tokens; `128k` is 131072, `1m` is 1048576."""
    from llamactl_supervisor.models import N_CTX_MAX, N_CTX_MIN, parse_tokens

    value = parse_tokens(text) or 0
    if not N_CTX_MIN <= value <= N_CTX_MAX:
        wanted = f"a number of tokens from {N_CTX_MIN} to {N_CTX_MAX} (128k is 131072)"
        message = f"must be {wanted}, not {text!r}"
        raise typer.BadParameter(message)
    return value


def tokens_or_auto(text: str) -> int | str:
    """Return a number of tokens, or `auto`."""
    from llamactl_supervisor.models import AUTO

    return text if text == AUTO else tokens(text)


def slots(text: str) -> int:
    """Return a number of slots."""
    from llamactl_supervisor.models import N_SEQ_MAX

    return _whole(text, "a number of slots", 1, N_SEQ_MAX)


def slot(text: str) -> int:
    """Return the number of a slot."""
    from llamactl_supervisor.models import N_SEQ_MAX

    return _whole(text, "the number of a slot", 0, N_SEQ_MAX - 1)


def port(text: str) -> int:
    """Return a TCP port."""
    from llamactl_supervisor.models import PORT_MAX

    return _whole(text, "a port", 1, PORT_MAX)


def log_lines(text: str | int) -> int:
    """Return a number of log lines. A default comes this way as well, as the number it is."""
    return _whole(str(text), "a number of lines", 0, LOG_LINES_MAX)


def ledger_lines(text: str) -> int:
    """Return a number of ledger lines."""
    return _whole(text, "a number of lines", 1, LEDGER_LINES_MAX)


def page_days(text: str | int) -> int:
    """Return a number of days. A default comes this way as well, as the number it is."""
    return _whole(str(text), "a number of days", 0, PAGE_DAYS_MAX)


def timeout(text: str | float) -> float:
    """Return a time in seconds. A default comes this way as well, as the number it is."""
    try:
        value_s = float(text)
    except ValueError:
        value_s = 0.0
    if not 0 < value_s <= TIMEOUT_S_MAX:
        message = f"must be a number of seconds above 0 and up to {TIMEOUT_S_MAX:g}, not {text!r}"
        raise typer.BadParameter(message)
    return value_s


def one_size(n_ctx: int | str | None, per_slot: int | None) -> None:
    """Refuse a total beside a size per slot: one follows from the other."""
    if n_ctx is not None and per_slot is not None:
        message = "is the total already: give one of the two"
        raise typer.BadParameter(message, param_hint="--n-ctx with --per-slot")


def total_tokens(per_slot: int, n_seq: int) -> int:
    """Return the total that `--per-slot` over `n_seq` slots asks for."""
    try:
        return tokens(str(per_slot * n_seq))
    except typer.BadParameter as exc:
        message = f"{per_slot} over {n_seq} slots {exc.message}"
        raise typer.BadParameter(message, param_hint="--per-slot") from None


def engine_options(args: list[str] | None) -> list[str]:
    """Return the engine's further arguments; a lone word is a slip, llama-server takes none."""
    if args and not args[0].startswith("-"):
        message = f"{args[0]!r} is no option of llama-server; a model is given with --model"
        raise typer.BadParameter(message, param_hint="-- ARGS")
    return args or []


def absolute(path: Path | None) -> str | None:
    """Return the path as the daemon is told it."""
    return None if path is None else str(path.absolute())


def _whole(text: str, what: str, least: int, most: int) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
    if not least <= value <= most:
        raise typer.BadParameter(f"must be {what} from {least} to {most}, not {text!r}")
    return value


NCtx = Annotated[
    int | None,
    typer.Option(
        "--n-ctx",
        "-c",
        parser=tokens,
        metavar="TOKENS",
        help="Context in tokens, in total over all slots; 128k is 131072.",
    ),
]
RequestedCtx = Annotated[
    Any,  # a number, `auto` or nothing: typer knows no unions
    typer.Option(
        "--n-ctx",
        "-c",
        parser=tokens_or_auto,
        metavar="TOKENS",
        help="Context in tokens, in total over all slots; 128k is 131072; auto: the engine's.",
    ),
]
NSeq = Annotated[
    int | None,
    typer.Option("--n-seq", "-np", parser=slots, metavar="SLOTS", help="Slots, 1 to 256."),
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGS]", help="After `--`: further llama-server options."),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", metavar="PATH", help="A GGUF file."),
]
Port = Annotated[
    int | None,
    typer.Option("--port", parser=port, metavar="PORT", help="For the clients."),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Where clients may come from; IPv4.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="PATH", help="Keys that clients must present."),
]
Engine = Annotated[
    Path | None,
    typer.Option("--engine", metavar="PATH", help="This llama-server; nothing is built."),
]
Slot = Annotated[
    int, typer.Argument(parser=slot, metavar="SLOT", help="The slot's number, from 0.")
]
PageName = Annotated[
    str, typer.Argument(metavar="NAME", help="The page's name: letters, digits, `.`, `_`, `-`.")
]
FileName = Annotated[
    str,
    typer.Argument(metavar="FILENAME", help="The files' name in the engine's directory; no path."),
]
PageDays = Annotated[
    int,
    typer.Option(
        "--days", parser=page_days, metavar="DAYS", help="How long damaged pages are kept."
    ),
]
PerSlot = Annotated[
    int | None,
    typer.Option(
        "--per-slot",
        parser=tokens,
        metavar="TOKENS",
        help="Context in tokens for each slot, in place of the total.",
    ),
]
KvUnified = Annotated[
    bool | None,
    typer.Option(
        "--kv-unified/--no-kv-unified", help="One pool for all slots, or a part of it for each."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; touch nothing.")]
RECONFIGURE_TIMEOUT_S = 180.0
"""Not shorter: the wait for the safe point can be the prefill of one whole batch."""
ReconfigureTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=timeout,
        metavar="SECONDS",
        help="How long to wait for the end; a long prompt delays the safe point.",
    ),
]
READ_TIMEOUT_S = 60.0
"""Not shorter: a sleeping engine loads its weights before it answers."""
ReadTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=timeout,
        metavar="SECONDS",
        help="How long to wait for the engine's answer; after it, exit 6.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        parser=timeout,
        metavar="SECONDS",
        help="How long to wait for the end; without it, as long as the daemon does.",
    ),
]
