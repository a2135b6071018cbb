"""The documents of the tree: their links, and their blocks with what is needed to run them.

A block in a shell's language is run by `test_docs.py`. One that needs more than the tree has a
comment above it that says what: `<!-- needs: a running engine -->`.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
UPSTREAM = ROOT / "patches" / "llama.cpp"
NEEDS = re.compile(r"<!-- needs: (.+) -->\n?")
WEB = ("http://", "https://", "mailto:")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, what it is written in, and what running it needs."""

    document: str
    line: int
    language: str
    text: str
    needs: str | None
    answer: str | None
    """The block of JSON that follows it: what it prints."""

    def __str__(self) -> str:
        """Return the place, as a person opens it."""
        return f"{self.document}:{self.line}"


def documents() -> list[str]:
    """Return every Markdown file of the tree, as a path from its root."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md") if UPSTREAM not in path.parents)
    return sorted(str(path) for path in found if not any(p.startswith(".") for p in path.parts))


@functools.cache
def tokens(document: str) -> list[Token]:
    """Return what the document is made of."""
    return MarkdownIt("commonmark").enable("table").parse((ROOT / document).read_text())


def blocks(document: str) -> Iterator[Block]:
    """Yield the fenced blocks."""
    found = tokens(document)
    for before, token, after in zip([None, *found], found, [*found[1:], None], strict=False):
        if token.type == "fence":
            assert token.map is not None
            comment = before.content if before is not None and before.type == "html_block" else ""
            needs = NEEDS.fullmatch(comment)
            is_answered = after is not None and after.type == "fence" and after.info == "json"
            yield Block(
                document,
                token.map[0] + 1,
                token.info,
                token.content,
                None if needs is None else needs[1],
                after.content if is_answered and after is not None else None,
            )


def links(document: str) -> Iterator[str]:
    """Yield where the document's own links and pictures lead to, those into the web left out."""
    for token in tokens(document):
        for child in token.children or ():
            target = str(child.attrs.get("href") or child.attrs.get("src") or "")
            if target and not target.startswith(WEB):
                yield target


def anchors(document: str) -> set[str]:
    """Return what a code host makes of the document's headings to link to."""
    found: list[str] = []
    for token, inline in itertools.pairwise(tokens(document)):
        if token.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            times = found.count(slug)
            found.append(slug)
            if times:
                found.append(f"{slug}-{times}")
    return set(found)
