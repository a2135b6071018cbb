"""What an engine is asked to be, in a form in which two of them can be compared. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.models import Wire
from llamactl_supervisor.option_table import KV_UNIFIED, N_CTX, N_SEQ, ON, OptionClass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llamactl_supervisor.models import EngineRequest
    from llamactl_supervisor.option_table import ArgsAnswer, Given

AUTO: Literal["auto"] = "auto"
AUTO_N_SEQ = 4
"""Slots of an engine that was given no number of them; they share one pool."""
WRITTEN = frozenset({"--log-file", "--log-prompts-dir", "--lookup-cache-dynamic"})
"""Options that name what the engine itself writes: what is in there is no reason for anything."""
LOADED = frozenset(
    [
        *("--lora", "--lora-scaled", "--mmproj", "--spec-draft-model"),
        *("--path", "--mcp-servers-config"),
    ]
)
"""Options that name what an engine ends for where it is missing, after it has taken its options."""
_OURS = frozenset(["--model", "--host", "--port", "--instance-id", "--admin-private", "--metrics"])
"""What the supervisor puts on every command line, whatever else gives it a value."""
_KEYS = "--api-key-file"
_FETCHED = frozenset(["--hf-repo", "--model-url", "--docker-repo"])
"""What names a model that llama-server fetches; it then loads that, whatever `--model` says."""


class EngineSpec(Wire):
    """An engine as it is asked for: nothing in it was rounded or chosen by the engine.

    `build` and `build_content` are its binary's, `options` the values of each option that is
    given, by canonical name and in their order; `files` maps each value that names a file to the
    fingerprint of its content. `context` is what its process is given, by field, in words; a
    secret in it is a hash. Where two engines differ is said by `differing`.
    """

    build: str
    build_content: str
    n_ctx: int | Literal["auto"]
    n_seq: int
    kv_unified: bool
    options: dict[str, tuple[tuple[str, ...], ...]]
    classes: dict[str, OptionClass]
    files: dict[str, str]
    context: dict[str, str]

    def with_geometry(
        self, n_ctx: int | Literal["auto"], n_seq: int, kv_unified: bool | None
    ) -> EngineSpec:
        """Return the same with this geometry; None keeps how the slots share."""
        unified = self.kv_unified if kv_unified is None else kv_unified
        return self.model_copy(update={"n_ctx": n_ctx, "n_seq": n_seq, "kv_unified": unified})

    @property
    def model(self) -> str | None:
        """The fingerprint of the model that it loads; None where it could not be read."""
        names = [word for given in self.options.get("--model", ()) for word in given]
        return self.files.get(names[-1]) if names else None

    def content(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Return the option's values with what is in a file in place of the file's name."""
        given = self.options.get(name, ())
        return tuple(tuple(self.files.get(value, value) for value in one) for one in given)

    def shown(self, name: str) -> str | None:
        """Return the option's values as a person reads them; None where it is not given."""
        given = self.options.get(name)
        return None if given is None else ", ".join(" ".join(one) or "given" for one in given)


def engine_spec(
    answer: ArgsAnswer,
    request: EngineRequest,
    *,
    build_content: str,
    files: Mapping[str, str],
    context: Mapping[str, str],
) -> EngineSpec:
    """Return the spec of an engine that is started with what `answer` was asked about.

    `request` says what the supervisor has put on that command line itself, in other words.
    """
    n_ctx, n_seq, kv_unified = geometry(answer)
    options: dict[str, list[tuple[str, ...]]] = {
        "--model": [(request.model,)],
        "--host": [(request.host,)],
        "--port": [(str(request.port),)],
    }
    if request.api_key_file is not None:
        options[_KEYS] = [(request.api_key_file,)]
    for each in _others(answer):
        if answer.classes.get(each.name) != "live":
            options.setdefault(each.name, []).append(tuple(each.values))
    return EngineSpec(
        build=answer.build,
        build_content=build_content,
        n_ctx=n_ctx,
        n_seq=n_seq,
        kv_unified=kv_unified,
        options={name: tuple(values) for name, values in options.items()},
        classes={name: answer.classes.get(name, "model") for name in options},
        files=dict(files),
        context=dict(context),
    )


def require_file(answer: ArgsAnswer) -> None:
    """Raise `model_elsewhere` where the engine would load another model than the named file."""
    for each in answer.given:
        if each.name in _FETCHED and any(each.values):
            where = "" if each.source == "argv" else f" ({each.source})"
            raise error(
                Code.MODEL_ELSEWHERE,
                f"{each.name}{where}: the model is no file",
                hint="-m names the file that was fetched, without that option",
                details={"option": each.name, "source": each.source},
            )


def geometry(answer: ArgsAnswer) -> tuple[int | Literal["auto"], int, bool]:
    """Return n_ctx, n_seq and kv_unified that are asked for, from whatever source.

    No n_ctx, or 0, leaves it to the engine. Without a number of slots it has `AUTO_N_SEQ`, which
    share one pool; with one, each has its own part, unless it is told otherwise.
    """
    n_ctx, n_seq = _number(answer.last(N_CTX), 0), _number(answer.last(N_SEQ), -1)
    if n_seq < 0:
        return n_ctx or AUTO, AUTO_N_SEQ, True
    return n_ctx or AUTO, n_seq, answer.last(KV_UNIFIED) == ON


def named_files(answer: ArgsAnswer) -> Iterator[str]:
    """Yield every value that may be the name of a file, or of some, that the engine reads."""
    for each in _others(answer):
        if each.name not in WRITTEN:
            yield from each.values


def loaded_files(answer: ArgsAnswer) -> Iterator[tuple[str, str]]:
    """Yield option and value of every file, or list of files, without which there is no engine."""
    for each in answer.given:
        if each.name in LOADED:
            yield from ((each.name, value) for value in each.values if value)


def _others(answer: ArgsAnswer) -> Iterator[Given]:
    """Yield what is given and not the supervisor's own; the keys' file is another in each run."""
    for each in answer.given:
        if each.name not in _OURS and (each.name, each.source) != (_KEYS, "argv"):
            yield each


def _number(text: str | None, otherwise: int) -> int:
    """Return what the engine has already read as a number."""
    try:
        return otherwise if text is None else int(text)
    except ValueError:
        return otherwise
