"""Which source gives each value of a configuration: flag, environment, file or default."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from llamactl_supervisor.api_settings import Address, ListenAddress
from llamactl_supervisor.errors import Code, error
from llamactl_supervisor.fields import (
    N_CTX_MIN,
    N_SEQ_MAX,
    AbsolutePath,
    Host,
    NSeq,
    RequestedCtx,
    parse_tokens,
    problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llamactl_supervisor.errors import LlamactlError

DEFAULT = "default"
ENV_PREFIX = "LLAMACTL_"
SHARED_PREFIX = frozenset({"daemon", "paths"})
"""Sections whose environment names carry no section."""
VALUE_CHARS_MAX = 80
"""How much of a bad value is repeated in its error."""
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_ALLOWED = (
    (RequestedCtx, f"tokens from {N_CTX_MIN}: an integer, or a string like '128k', or 'auto'"),
    (NSeq, f"integer from 1 to {N_SEQ_MAX}"),
    (Host, "IPv4 address of this machine"),
    (AbsolutePath, "path"),
    (ListenAddress, "IP address of this machine and port, as 127.0.0.1:9090"),
)
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}

Root = TypeVar("Root", bound=BaseModel)


@dataclass(frozen=True)
class Flag:
    """A value from the command line, under the name that it was given by there."""

    name: str
    value: Any


@dataclass(frozen=True)
class Value:
    """A value and where it comes from: `default`, `file PATH, KEY`, `env NAME`, `flag NAME`."""

    value: Any
    source: str

    @property
    def is_default(self) -> bool:
        """Whether nobody has set it."""
        return self.source == DEFAULT


@dataclass(frozen=True)
class File:
    """A configuration file as it was read: its TOML, and the SHA-256 of its bytes."""

    path: Path
    tables: Mapping[str, Any]
    digest: str | None = None


@dataclass(frozen=True)
class Key:
    """One key of a configuration: its place, its names, and what its values may be."""

    section: str
    field: str
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """The key as it is written: `engine.n_ctx`."""
        return f"{self.section}.{self.field}"

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        if self.section in SHARED_PREFIX:
            return ENV_PREFIX + self.field.upper()
        prefix = f"{self.section}_"
        return ENV_PREFIX + (prefix + self.field.removeprefix(prefix)).upper()

    @property
    def allowed(self) -> str:
        """What a value may be, as a person reads it."""
        for kind, words in _ALLOWED:
            if self.kind == kind:
                return words
        base, bounds = _plain(self.kind)
        names = {int: "integer", float: "number", bool: "true or false", tuple: "list of strings"}
        return " ".join([names.get(base, "string"), *bounds])


def keys(root: type[BaseModel]) -> Iterator[Key]:
    """Yield every key that a configuration of class `root` has, section by section."""
    for section, table in get_type_hints(root).items():
        if section in root.model_fields:
            hints = get_type_hints(table, include_extras=True)
            for field, info in table.model_fields.items():
                kinds = [kind for kind in get_args(hints[field]) if kind is not type(None)]
                optional = type(None) in get_args(hints[field])
                kind = kinds[0] if optional else hints[field]
                yield Key(section, field, kind, info.default)


def resolve(
    root: type[Root],
    *,
    file: File | None,
    env: Mapping[str, str],
    flags: Mapping[str, Flag],
    defaults: Mapping[str, Any],
) -> tuple[Root, dict[str, Value]]:
    """Return the configuration and, by key, each value with its source. Pure.

    A flag wins over the environment, that over the file, that over `defaults`, and those over the
    defaults of the class. An empty environment variable sets nothing. Raises `config_invalid` for
    what is wrong in the file and `invalid_request` for the rest; both name source and key.
    """
    known = {key.name: key for key in keys(root)}
    if file is not None:
        _only_known(file, known)
    values = {name: _choose(key, file, env, flags, defaults) for name, key in known.items()}
    tables = {}
    for section, table in get_type_hints(root).items():
        if section not in root.model_fields:
            continue
        given = {
            key.field: values[name].value
            for name, key in known.items()
            if key.section == section and (not values[name].is_default or name in defaults)
        }
        try:
            tables[section] = table.model_validate(given, strict=True)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            if not first["loc"]:
                raise _bad_section(section, values, first["msg"]) from None
            key = known[f"{section}.{first['loc'][0]}"]
            raise _bad_value(key, values[key.name], first["type"], problem(first)) from None
        for key in known.values():
            if key.section == section:
                found = getattr(tables[section], key.field)
                values[key.name] = Value(told(found), values[key.name].source)
    return root.model_validate(tables), values


def told(value: Any) -> Any:
    """Return a value of the configuration as it is written there."""
    return str(value) if isinstance(value, Address) else value


def _choose(
    key: Key,
    file: File | None,
    env: Mapping[str, str],
    flags: Mapping[str, Flag],
    defaults: Mapping[str, Any],
) -> Value:
    if key.name in flags:
        return Value(_converted(key, flags[key.name].value), f"flag {flags[key.name].name}")
    if env.get(key.env):
        text = env[key.env]
        found = _path(text, env, Path.cwd()) if key.kind == AbsolutePath else _parsed(key, text)
        return Value(_converted(key, found), f"env {key.env}")
    if file is not None and key.field in file.tables.get(key.section, {}):
        found = file.tables[key.section][key.field]
        if key.kind == AbsolutePath and isinstance(found, str):
            found = _path(found, env, file.path.parent)
        return Value(_converted(key, found), f"file {file.path}, {key.name}")
    return Value(defaults.get(key.name, key.default), DEFAULT)


def _converted(key: Key, value: Any) -> Any:
    """Return the value in the form that its class takes; what has none is left to be refused."""
    if key.kind == RequestedCtx and isinstance(value, str):
        return parse_tokens(value) or value
    return tuple(value) if isinstance(value, list) else value


def _parsed(key: Key, text: str) -> Any:
    """Return what the text of an environment variable says; nonsense is left to be refused."""
    base, _ = _plain(key.kind)
    if key.kind in (RequestedCtx, ListenAddress):
        return text
    try:
        if base is bool:
            return _WORDS.get(text.lower(), text)
        return base(shlex.split(text) if base is tuple else text)
    except ValueError:
        return text


def _path(text: str, env: Mapping[str, str], below: Path) -> str:
    if text == "~" or text.startswith("~/"):
        text = env.get("HOME", "~") + text[1:]
    return str(below / text) if text else text


def _plain(kind: Any) -> tuple[type, list[str]]:
    """Return the class below the annotations of `kind`, and its bounds as a person reads them."""
    if get_origin(kind) is Literal:
        return str, [" or ".join(map(repr, get_args(kind)))]
    extras = getattr(kind, "__metadata__", ())
    bounds = [
        f"{words} {getattr(bound, name):.15g}"
        for extra in extras
        for bound in getattr(extra, "metadata", ())
        for name, words in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    base = get_args(kind)[0] if extras else kind
    return get_origin(base) or base, bounds


def _only_known(file: File, known: Mapping[str, Key]) -> None:
    sections = sorted({key.section for key in known.values()})
    for section, table in file.tables.items():
        if section not in sections:
            places = [f"[{key.section}]" for key in known.values() if key.field == section]
            if isinstance(table, dict):
                raise _unknown(file, "section", section, sections)
            raise _unknown(file, "key outside of a section", section, places or sections)
        if not isinstance(table, dict):
            message = f"file {file.path}: {section} must be a section, [{section}]"
            raise error(Code.CONFIG_INVALID, message, details={"field": section})
        fields = [key.field for key in known.values() if key.section == section]
        for field in table:
            if field not in fields:
                raise _unknown(file, f"key in [{section}]", field, fields)


def _unknown(file: File, what: str, name: str, names: list[str]) -> LlamactlError:
    near = difflib.get_close_matches(name, names, n=1)
    in_section = names[0].startswith("[")
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    hint = f"it belongs into {' or '.join(names)}" if in_section else hint
    message = f"file {file.path}: {name[:VALUE_CHARS_MAX]!r} is no {what}"
    return error(
        Code.CONFIG_INVALID, message, hint=hint, details={"file": str(file.path), "field": name}
    )


def _bad_section(section: str, values: Mapping[str, Value], said: str) -> LlamactlError:
    """Return the error of values that do not go together, with all that were given."""
    given = {
        name: value.source
        for name, value in values.items()
        if name.startswith(f"{section}.") and not value.is_default
    }
    in_file = any(source.startswith("file ") for source in given.values())
    return error(
        Code.CONFIG_INVALID if in_file else Code.INVALID_REQUEST,
        f"[{section}]: {said}",
        hint=f"given: {'; '.join(f'{name} by {source}' for name, source in given.items())}",
        details={"field": section, "sources": given},
    )


def _bad_value(key: Key, value: Value, kind: str, said: str) -> LlamactlError:
    where, _, name = value.source.partition(" ")
    told = f"{where} {name}" if where == "file" else name
    # A list is not repeated: an argument in it may be a secret that does not belong there.
    scalar = isinstance(value.value, str | int | float)
    shown = f"={_literal(value.value)}" if scalar else ""
    code = kind if kind in {Code.INVALID_GEOMETRY, Code.OWNED_ARGUMENT} else Code.INVALID_REQUEST
    return error(
        Code.CONFIG_INVALID if where == "file" else code,
        f"{told}{shown}: {said}",
        hint=f"{key.name} takes: {key.allowed}",
        details={"field": key.name, "source": value.source},
    )


def _literal(value: str | float) -> str:
    """Return the value as TOML writes it."""
    if isinstance(value, str):
        return repr(value[:VALUE_CHARS_MAX])
    return str(value).lower()
