"""How long the daemon waits and what it keeps: times, budgets and sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """Times, budgets and sizes, each in the unit that ends its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ready_stall_s: Seconds = 300.0
    """A load is given up when neither health nor log nor exit has moved for this long."""
    ready_poll_s: Seconds = 0.1
    """Pause between two questions for the engine's health while it loads."""
    probe_s: Seconds = 2.0
    """Pause between two looks at an engine that serves."""
    wedge_idle_s: Seconds = 30.0
    """An engine that should move and neither does nor uses any processor is wedged after this."""
    wedge_busy_s: Seconds = 600.0
    """The same for one that uses processor; longer if its micro-batches are known to be long."""
    override_trial_s: Seconds = 600.0
    """A crash this soon after a live change of the geometry goes back to the one before."""
    stop_term_s: Seconds = 5.0
    """From TERM to KILL."""
    backoff_base_s: Seconds = 1.0
    """Upper bound of the first retry's delay; doubles with each crash."""
    backoff_cap_s: Seconds = 60.0
    """Upper bound of every retry's delay."""
    crashes_max: Annotated[int, Field(ge=0)] = 5
    """Retries before the engine is FAILED."""
    on_failed: Literal["stay", "exit"] = "stay"
    """Once the engine was given up: `stay` and wait for a person, or `exit` with status 3."""
    settle_s: Seconds = 180.0
    """READY for this long makes the next crash the first one again."""
    holder_exit_s: Seconds = 5.0
    """How long after the engine its holder may take to write the exit record."""
    close_s: Seconds = 2.0
    """How long open control connections may hold up the daemon's exit."""
    log_bytes_max: Annotated[int, Field(ge=4096)] = 16 * 2**20
    """Size at which the engine's log is rotated."""
    log_files_max: Annotated[int, Field(ge=1)] = 4
    """Log files kept, the current one included."""
