"""What is left where no daemon answers: engines and holders that outlived it. It only reads."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamactl_supervisor import instances, locks, procfs, store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamactl_supervisor.models import Problem, ProcessIdentity, UpRequest
    from llamactl_supervisor.paths import Paths


@dataclass(frozen=True)
class Remnant:
    """A process that lives on. `doubt` None: proven to be the one that its record names.

    `adoptable`: the saved state names it too, or none that lives and this is the only one, so the
    next daemon takes it over. With a `doubt` it may be anybody. An engine's `holder` ends with it.
    """

    process: ProcessIdentity
    role: str
    instance_id: str
    adoptable: bool
    doubt: str | None
    holder: ProcessIdentity | None = None

    @property
    def pid(self) -> int:
        """The pid that it has."""
        return self.process.pid

    @property
    def age_s(self) -> float | None:
        """For how many seconds it has run."""
        return procfs.age_s(self.pid)


def desired(paths: Paths) -> UpRequest | None:
    """Return the engine that was last asked for, as the saved state has it."""
    return store.peek(paths.state_file).desired


def given_up(paths: Paths) -> Problem | None:
    """Return why the engine was given up, as the saved state has it; None where it was not."""
    return store.peek(paths.state_file).failed


def engine_pids(paths: Paths) -> list[int]:
    """Return the engines whose holders recorded them here and that still run."""
    return sorted(found.pid for found in recorded(paths) if found.role == "engine")


def recorded(paths: Paths) -> list[Remnant]:
    """Return the living engines that their holders recorded, and holders that outlived theirs."""
    found = [each for name in instances.names(paths) for each in _recorded(paths, name)]
    adopted = _adopted(paths, found)
    return [replace(each, adoptable=each.instance_id == adopted) for each in found]


def unrecorded(paths: Paths, known: set[int]) -> list[Remnant]:
    """Return engines of this runtime directory that no record names any more, or only the state."""
    doubt = "its holder's record is gone; only its command line names this directory"
    found = {
        each.engine.pid: Remnant(each.engine, "engine", each.instance_id, False, doubt)
        for each in instances.claimed(paths)
    }
    found |= {each.pid: each for each in _named(paths)}
    return [each for each in found.values() if each.pid not in known]


def _recorded(paths: Paths, name: str) -> Iterator[Remnant]:
    record = instances.record(paths, name)
    if record is None:
        return
    doubt = _open_to_others(paths.engine_dir(name))
    holder = record.holder if procfs.alive(record.holder) else None
    if record.engine is not None and procfs.alive(record.engine):
        yield Remnant(record.engine, "engine", name, False, doubt, holder)
    elif holder is not None:
        yield Remnant(holder, "holder", name, False, doubt)


def _adopted(paths: Paths, found: list[Remnant]) -> str | None:
    """Return the instance that the next daemon takes over, if any.

    None while a daemon of another runtime directory has the state: none can start here then.
    """
    if locks.elsewhere(paths) is not None:
        return None
    names = [each.instance_id for each in found if each.role == "engine" and each.doubt is None]
    named = store.peek(paths.state_file).instance_id
    if named in names:
        return named
    if len(names) != 1:
        return None
    others = {each.instance_id for each in _named(paths)}
    others |= {each.instance_id for each in instances.claimed(paths)}
    if others - set(names):
        return None
    return names[0] if instances.asked(paths, names[0]) is not None else None


def _named(paths: Paths) -> Iterator[Remnant]:
    """Yield the living engines that the saved state names.

    While a daemon of another runtime directory has the state, they are that daemon's: none.
    """
    if locks.elsewhere(paths) is not None:
        return
    saved = store.peek(paths.state_file)
    for each in (saved.process, *saved.unproven):
        if each is not None and procfs.alive(each.engine):
            doubt = "the saved state names it, but its holder's record is gone"
            yield Remnant(each.engine, "engine", each.instance_id, False, doubt)


def _open_to_others(directory: Path) -> str | None:
    """Return why a record in there may be anybody's; None where only we can have written it."""
    for place in (directory, directory.parent):
        try:
            found = place.stat()
        except OSError as exc:
            return f"{place}: {exc.strerror}"
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            return f"others may write in {place}: its record proves nothing"
    return None
