"""The control API as a document for people, made of its OpenAPI description."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_HEAD = """\
# Control API

{description}

For a program: [openapi.json](openapi.json). For Python: `llamactl_supervisor.client`.

Generated: `make docs`.

## Routes

| | |
|---|---|
"""
_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}


def document(openapi: Mapping[str, Any]) -> str:
    """Return the description in Markdown: every route, then every shape that one of them names."""
    routes = [
        (f"{method.upper()} {path}", operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    lines = [_HEAD.format(description=openapi["info"]["description"].strip()).rstrip()]
    lines += [f"| [`{name}`](#{_anchor(name)}) | {_summary(of)} |" for name, of in routes]
    for name, operation in routes:
        lines += ["", f"### {name}", "", *_route(operation)]
    lines += ["", "## Shapes"]
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        lines += ["", f"### {name}", "", *_shape(schema)]
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    """Return what a code host makes of a heading to link to."""
    kept = "".join(char for char in heading.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")


def _summary(operation: Mapping[str, Any]) -> str:
    return str(operation["description"]).split("\n\n")[0].replace("\n", " ")


def _route(operation: Mapping[str, Any]) -> Iterator[str]:
    yield operation["description"]
    yield ""
    if parameters := operation.get("parameters"):
        rows = ((found["name"], found["schema"], found["required"]) for found in parameters)
        yield from (*_table("parameter", rows), "")
    if body := operation.get("requestBody"):
        shape = _type(body["content"]["application/json"]["schema"])
        yield f"Body: {shape}{'' if body.get('required') else ', or none'}.\n"
    answers = sorted(operation["responses"].items())
    yield f"Answers: {'; '.join(f'{status} {_answer(of)}' for status, of in answers)}."


def _answer(response: Mapping[str, Any]) -> str:
    if "content" not in response:
        return "a stream"
    [(media, content)] = response["content"].items()
    return _type(content["schema"]) if media.endswith("json") else f"`{media}`"


def _shape(schema: Mapping[str, Any]) -> Iterator[str]:
    if description := schema.get("description"):
        yield from (description, "")
    if "enum" in schema:
        yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}."
        return
    required = schema.get("required", ())
    rows = ((name, field, name in required) for name, field in schema["properties"].items())
    yield from _table("field", rows)


def _table(what: str, rows: Iterable[tuple[str, Mapping[str, Any], bool]]) -> Iterator[str]:
    """Yield a table of values: their names, what they may be, and what they are if left out."""
    yield from (f"| {what} | type | default |", "|---|---|---|")
    for name, schema, required in rows:
        default = "" if required else f"`{json.dumps(schema.get('default'))}`"
        yield f"| `{name}` | {_type(schema)} | {default} |"


def _type(schema: Mapping[str, Any]) -> str:
    """Return what a value may be; a shape of ours is a link."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, either)))
    if values := schema.get("enum") or [schema[key] for key in ("const",) if key in schema]:
        return " or ".join(f"`{value}`" for value in values)
    kind = schema.get("format") or schema.get("type", "any value")
    if kind == "array":
        return f"list of {_type(schema.get('items') or schema['prefixItems'][0])}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"object of {_type(values)}"
    bounds = [f"{word} {schema[key]:.15g}" for key, word in _BOUNDS.items() if key in schema]
    return " ".join([kind, *bounds])
