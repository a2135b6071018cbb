"""Conversations in files between two engines: which, under which names, and where each belongs.

The manifest is written before the first conversation is, so that whoever dies at any moment leaves
files that are named. It keeps a conversation until an engine that serves has it; one that no
engine takes (another model's, one that is too long) stays in it for the engine that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from llamactl_supervisor.fields import PageName, Slot  # noqa: TC001 - pydantic needs them
from llamactl_supervisor.models import CarriedConversation, CarryFate, Wire

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from llamactl_supervisor.models import Page, SlotState

CONVERSATIONS_MAX = 10_000
"""More of them are no manifest of ours."""
FILE_SUFFIXES = ("", ".ckpt", ".lora", ".dft")
"""Files of one conversation, by the engine's contract."""
_PARKED = "parked-"
"""Page names that only the engine gives."""
_BACK = "carried-"

# It is a name and no path, whoever wrote the manifest.
FileOfOurs = Annotated[str, Field(pattern=r"^carry-[0-9a-f]{32}-[0-9]{1,6}$")]


@dataclass(frozen=True)
class Taker:
    """What of an engine decides whether it takes a conversation; None: that is not known.

    `content` is the fingerprint of its model, `cache_types` are those of its K and V.
    """

    directory: str
    model: str
    content: str | None = None
    cache_types: str | None = None

    def refusal(self, each: Conversation) -> str | None:
        """Return why this engine cannot take it; None: for all that is known it can."""
        if each.directory != self.directory:
            return f"its files are in {each.directory}, this engine's are in {self.directory}"
        known = each.content is not None and self.content is not None
        if known and each.content != self.content and each.model == self.model:
            return f"it is of another model, which was {each.model} before"
        if (each.content != self.content) if known else (each.model != self.model):
            return f"it is of another model, {each.model}"
        if each.cache_types is None or self.cache_types in (None, each.cache_types):
            return None
        return f"its KV types are {each.cache_types}, this engine's are {self.cache_types}"


@dataclass(frozen=True)
class Place:
    """Where a conversation is, or goes: a slot, or a page; to a page the way is through `slot`.

    A page with a `home` is parked: a change that has room places it back, into that slot if free.
    """

    slot: int | None
    page: str | None = None
    home: int | None = None

    def __str__(self) -> str:
        """Return it as a person reads it."""
        return f"slot {self.slot}" if self.page is None else f"page {self.page}"


class Conversation(Wire):
    """A conversation in files. `written` false: it was going to be, when its writer was last heard.

    It comes from a slot or from a page of the engine that `file` names, a page that was parked
    from the slot `home` before that. `directory`, `model`,
    `content` and `cache_types` are that engine's (see `Taker`). `into` is the engine that it is
    being brought into, `reason` why the last one did not take it.
    """

    file: FileOfOurs
    slot: Slot | None = None
    page: PageName | None = None
    home: Slot | None = None
    n_tokens: Annotated[int, Field(ge=0)]
    n_bytes: Annotated[int, Field(ge=0)] = 0
    directory: str
    model: str
    content: str | None = None
    cache_types: str | None = None
    written: bool = False
    into: str | None = None
    reason: str | None = None

    @property
    def origin(self) -> str:
        """The engine that held it."""
        return self.file.split("-")[1]

    @property
    def is_left(self) -> bool:
        """Whether an engine did not take it: it comes after what the last one held."""
        return self.reason is not None

    @property
    def was(self) -> Place:
        """Where that engine held it."""
        return Place(self.slot, self.page)

    @property
    def wants(self) -> int | None:
        """The slot that it is to be in; None: it is to be a page."""
        return self.slot if self.home is None else self.home

    def told(
        self, fate: CarryFate, place: str | None, reason: str | None = None
    ) -> CarriedConversation:
        """Return what became of it."""
        return CarriedConversation(
            what=str(self.was),
            n_tokens=self.n_tokens,
            fate=fate,
            place=place,
            reason=reason,
            n_bytes=self.n_bytes,
            file=self.file,
        )


class Manifest(Wire):
    """The conversations that are in files."""

    version: Literal[1] = 1
    conversations: Annotated[tuple[Conversation, ...], Field(max_length=CONVERSATIONS_MAX)] = ()

    def add(self, new: Iterable[Conversation]) -> Manifest:
        """Return it with these; one with the name of another takes its place."""
        by_file = {each.file: each for each in (*self.conversations, *new)}
        return self.model_copy(update={"conversations": tuple(by_file.values())})

    def drop(self, files: Collection[str]) -> Manifest:
        """Return it without these."""
        kept = tuple(each for each in self.conversations if each.file not in files)
        return self.model_copy(update={"conversations": kept})

    def held_by(self, engine: str) -> tuple[Conversation, ...]:
        """Return what this engine holds as well: it comes from there, or was brought there."""
        return tuple(each for each in self.conversations if engine in (each.origin, each.into))


def held(
    slots: Iterable[SlotState],
    pages: Collection[Page],
    *,
    instance: str,
    engine: Taker,
    seen: Collection[tuple[Place, int]] = (),
) -> list[Conversation]:
    """Return what the engine holds, the one that would take longest to prefill first.

    A slot that does not say how much it holds counts as one that may hold something. What was
    `seen` before, by place and tokens, is left out, and its file's name not given again.
    """
    places = [
        (Place(slot.id), slot.n_prompt_tokens or 0)
        for slot in slots
        if not slot.parked and slot.n_prompt_tokens != 0
    ]
    places += [(Place(None, page.name), page.n_tokens) for page in pages]
    homes = {page.name: page.slot for page in pages if page.parked}
    places = sorted(set(places).difference(seen), key=lambda each: (-each[1], str(each[0])))
    return [
        Conversation(
            file=f"carry-{instance}-{number}",
            slot=place.slot,
            page=place.page,
            home=homes.get(place.page or ""),
            n_tokens=n_tokens,
            directory=engine.directory,
            model=engine.model,
            content=engine.content,
            cache_types=engine.cache_types,
        )
        for number, (place, n_tokens) in enumerate(places, len(seen) + 1)
    ]


def placed(
    conversations: Sequence[Conversation], slots: Sequence[int]
) -> list[tuple[Conversation, Place | None]]:
    """Return where each goes in an engine with these `slots`, all empty, in the order of going.

    Pages come first, for the way to one is through an empty slot. What the engine before this one
    held goes into its own slot where there is one, else into any, else it is parked; what was
    parked comes after those that were not. What was left before gets what is free then: a slot, or
    the page of its name; None: nothing is.
    """
    ranked = _ranked(conversations)
    held = [each for each in ranked if not each.is_left]
    left = [each for each in ranked if each.is_left]
    free, taken = list(slots), set[str]()
    in_slots, homeless = _in_slots([each for each in held if each.slot is not None], free)
    unparked, parked = _in_slots([each for each in held if each.home is not None], free)
    order: list[tuple[Conversation, Place | None]] = []
    if slots:
        named = [each for each in held if each.wants is None]
        order += _in_pages([*named, *homeless, *parked], slots[0], taken)
        order += _in_pages(_unnamed_twice(left, taken), slots[0], taken)
    order += [*in_slots, *unparked]
    order += _in_slots([each for each in left if each.slot is not None], free)[0]
    done = {each.file for each, _ in order}
    return [*order, *((each, None) for each in ranked if each.file not in done)]


def surplus(conversations: Sequence[Conversation], bytes_max: int) -> list[Conversation]:
    """Return what was left longest ago of what was left, until the rest is no more than this."""
    left = [each for each in conversations if each.is_left]
    over = sum(each.n_bytes for each in left) - bytes_max
    found = []
    for each in left:
        if over <= 0:
            break
        over -= each.n_bytes
        found.append(each)
    return found


def _ranked(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return those of the last engine first, and of each the most expensive prefill first."""
    engines = {each.origin: number for number, each in enumerate(conversations)}
    return sorted(conversations, key=lambda each: (-engines[each.origin], -each.n_tokens))


def _in_slots(
    conversations: Sequence[Conversation], free: list[int]
) -> tuple[list[tuple[Conversation, Place]], list[Conversation]]:
    """Return who goes into which slot, taken out of `free`, and for whom there is none."""
    chosen: dict[str, int] = {}
    for each in conversations:
        if (own := each.wants) in free:
            chosen[each.file] = own
            free.remove(own)
    for each in conversations:
        if each.file not in chosen and free:
            chosen[each.file] = free.pop(0)
    placed = [(each, Place(chosen[each.file])) for each in conversations if each.file in chosen]
    return placed, [each for each in conversations if each.file not in chosen]


def _unnamed_twice(left: Sequence[Conversation], taken: Collection[str]) -> list[Conversation]:
    """Return the pages among them whose names are free, one for each name."""
    pages: dict[str, Conversation] = {}
    for each in left:
        if each.page is not None and each.page not in taken:
            pages.setdefault(each.page, each)
    return list(pages.values())


def _in_pages(
    conversations: Sequence[Conversation], through: int, taken: set[str]
) -> list[tuple[Conversation, Place]]:
    """Return which page each becomes, added to `taken`: its own name, or a new one."""
    own = {each.page for each in conversations}
    new = (f"{_BACK}{number}" for number in count(1))
    found = []
    for each in conversations:
        page = each.page
        if page is None or page in taken or page.startswith(_PARKED):
            page = next(name for name in new if name not in taken and name not in own)
        taken.add(page)
        found.append((each, Place(through, page, each.wants)))
    return found
