"""What became of conversations that had to outlive their engine."""

from __future__ import annotations

from enum import StrEnum

from llamactl_supervisor.models.base import Problem, Wire


class CarryFate(StrEnum):
    """Where a conversation is. LEFT: still in its files, the engine did not take it.

    DROPPED: it was left, and there were more of these than are kept.
    """

    WRITTEN = "written"
    BACK = "back"
    LEFT = "left"
    DROPPED = "dropped"
    LOST = "lost"


class CarriedConversation(Wire):
    """A conversation on its way from one engine into the next.

    `what` is what held it (`slot 0`, `page fox`), `place` what holds it now: a slot, a page, or
    the name of its file. `reason` is why it is LEFT or LOST, or what it came back without.
    `n_bytes` is the size of its files.
    """

    what: str
    n_tokens: int
    fate: CarryFate
    place: str | None = None
    reason: str | None = None
    n_bytes: int = 0
    file: str


class CarryReport(Wire):
    """What became of every conversation. `problem`: why the engine could not be asked at all.

    `took_s` is how long it took, `quiet_s` for how long of that requests had to wait, `n_cut` how
    many had to be ended: they went on for longer than `drain_s`.
    """

    conversations: tuple[CarriedConversation, ...] = ()
    took_s: float = 0.0
    quiet_s: float = 0.0
    n_cut: int = 0
    problem: Problem | None = None

    def of(self, *fates: str) -> tuple[CarriedConversation, ...]:
        """Return the conversations that came to this."""
        return tuple(each for each in self.conversations if each.fate in fates)

    @property
    def has_losses(self) -> bool:
        """Whether a conversation was lost, or may have been: nobody could be asked."""
        return self.problem is not None or bool(self.of(CarryFate.LOST))

    @property
    def n_bytes(self) -> int:
        """Size of all their files together."""
        return sum(each.n_bytes for each in self.conversations)
