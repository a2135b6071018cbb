"""How long the daemon waits and what it keeps: times, budgets and sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LOG_BYTES_MIN = 2**16
"""A log of less is rotated with nearly every read of a talking engine: a load fills it twice."""
LOG_BYTES_MOST = 2**40
LOG_FILES_MOST = 1000
"""Each rotation renames every file."""


class Settings(BaseModel):
    """Times, budgets and sizes, each in the unit that ends its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ready_stall_s: Seconds = 300.0
    """A load is given up when health, log, processor and disk have not moved for this long."""
    ready_poll_s: Seconds = 0.1
    """Pause between two questions for the engine's health while it loads."""
    probe_s: Seconds = 2.0
    """Pause between two looks at an engine that serves."""
    wedge_idle_s: Seconds = 30.0
    """An engine that should move and neither does nor uses any processor is wedged after this."""
    wedge_busy_s: Seconds = 600.0
    """The same for one that uses processor; longer if its micro-batches are known to be long.

    Before the first has ended it is the processor's time that counts."""
    override_trial_s: Seconds = 600.0
    """A crash this soon after a live change of the geometry goes back to the one before."""
    linger_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """How long an engine stays for the next `llamactl run` once one has left it; on a GPU: 0."""
    linger_pressure: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """It stays no longer where something waits for memory this percentage of the time."""
    takeover_s: Seconds = 5.0
    """How long a `llamactl run` waits for another one that has the engine."""
    reattach_s: Seconds = 30.0
    """How long after a new daemon's start the owner of its predecessor may come back."""
    stop_term_s: Seconds = 5.0
    """From TERM to KILL."""
    carry_on_stop: bool = True
    """Write conversations to files before a stop or a TERM; the next start brings them back."""
    drain_s: Seconds = 30.0
    """How long requests may go on before a stop or a relaunch; what is left is cut, state kept."""
    carry_s: Seconds = 120.0
    """How long conversations may take to be written to files, and to be brought back."""
    carry_left_bytes_max: Annotated[int, Field(ge=0, le=2**60)] = 16 * 2**30
    """Files kept of conversations that the engine did not take; beyond it the oldest go, named."""
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
    watch_poll_s: Seconds = 2.0
    """Pause between two looks at the configuration file, for `llamactl serve --watch`."""
    close_s: Seconds = 2.0
    """How long open control connections may hold up the daemon's exit."""
    log_bytes_max: Annotated[int, Field(ge=LOG_BYTES_MIN, le=LOG_BYTES_MOST)] = 16 * 2**20
    """Size at which the engine's log is rotated."""
    log_files_max: Annotated[int, Field(ge=1, le=LOG_FILES_MOST)] = 4
    """Log files kept, the current one included."""
