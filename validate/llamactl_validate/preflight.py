"""What a validation takes of memory, disk and time, and whether that fits beside what runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl_supervisor import args, memory
from llamactl_supervisor.errors import InvalidRequestError, LlamactlError

from llamactl_validate import workplace
from llamactl_validate.engine import N_CTX, OPTIONS_OF_ENV
from llamactl_validate.scenario import Scale

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from llamactl_supervisor.option_table import DeviceMemory

    from llamactl_validate.scenario import Scenario

LARGEST = (8 * N_CTX, 32)
"""Tokens and slots of the largest geometry that any scenario asks for."""
BESIDE = (2 * N_CTX, 4)
"""Of one that is there while the largest is built beside it."""
RAM_FOR_ELSE = 256 * 2**20
"""Bytes of the engine's code, its threads, and ourselves."""
DISK_FOR_ELSE = 64 * 2**20
STATES_ON_DISK = 2
"""The bytes of the largest cache that all files of all scenarios stay below, together."""
WEIGHT_BYTES_PER_S = 5e9
"""How fast a processor of two cores goes through the weights: once for each forward pass."""
STEP_S_MIN = 0.02
"""Of the forward pass of a model that has hardly any."""
SCENARIO_S = 0.5
"""Of a scenario, beside its forward passes."""
LOAD_BYTES_PER_S = 1e9
LOADS = 8
"""Of the engines that scenarios share."""
DOES_NOT_FIT = "does_not_fit"
LESS_MEMORY = "end what else runs, name a smaller model"


@dataclass(frozen=True)
class Need:
    """What is needed, beside what there is."""

    what: str
    n_bytes: int
    there: int | None
    """None: it is not known."""
    limit: str
    """Whose number that is."""
    more: str
    """How there would be more of it, or less be needed."""

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.there is None or self.n_bytes <= self.there


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    scenarios: tuple[Scenario, ...]
    needs: tuple[Need, ...]
    seconds: float

    def data(self) -> dict[str, Any]:
        """Return what it takes, for a script."""
        needs = [
            {
                "what": need.what,
                "bytes_needed": need.n_bytes,
                "bytes_available": need.there,
                "limit": need.limit,
            }
            for need in self.needs
        ]
        return {"seconds": round(self.seconds, 3), "needs": needs}

    def refuse(self) -> None:
        """Raise `does_not_fit`, with both numbers, where there is no room; nothing was started."""
        refuse(self.needs)


def refuse(needs: Iterable[Need]) -> None:
    """Raise `does_not_fit`, with both numbers, for the first that there is no room for."""
    for need in needs:
        if not need.fits:
            raise InvalidRequestError(
                DOES_NOT_FIT,
                f"not run: {need.n_bytes} bytes of {need.what} are needed, "
                f"{need.there} are there ({need.limit})",
                hint=f"{need.more}, or go on anyway with --yes",
                details={
                    "what": need.what,
                    "bytes_needed": need.n_bytes,
                    "bytes_available": need.there,
                },
            )


def plan(engine: Path, model: Path, scenarios: Sequence[Scenario], scale: Scale) -> Plan:
    """Ask the engine what it would take; nothing is loaded.

    Raises `path_too_long`, and what `needs` raises.
    """
    workplace.check_paths()
    seconds = _seconds(model, scenarios, scale)
    return Plan(tuple(scenarios), needs(engine, model, LARGEST, BESIDE), seconds)


def needs(
    engine: Path,
    model: Path,
    largest: tuple[int, int],
    beside: tuple[int, int],
    *,
    n_engines: int = 1,
) -> tuple[Need, ...]:
    """Return what engines take whose context becomes the largest, built while one is beside it.

    Both are tokens and slots. Raises what `llamactl_supervisor.args.memory` raises: for a binary
    that cannot be run, for a model that it does not take, and `not_supported` for an engine
    without the patches; all of it as a request that makes no sense.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(OPTIONS_OF_ENV)}

    def measured(n_ctx: int, n_seq: int) -> list[DeviceMemory]:
        geometry = ("--ctx-size", str(n_ctx), "--parallel", str(n_seq))
        try:
            return args.memory([str(engine), "--model", str(model), *geometry], env).devices
        except LlamactlError as exc:
            why = f"not run: {exc.message}"
            raise InvalidRequestError(exc.code, why, hint=exc.hint, details=exc.details) from exc

    smaller = {device.name: device for device in measured(*beside)}
    found, context = [], 0
    for device in measured(*largest):
        other = smaller.get(device.name)
        n_bytes = n_engines * device.n_bytes
        n_bytes += 0 if other is None else other.context + other.compute
        context += device.context
        if device.is_host:
            there = memory.available()
            # Pages and parked states are in host memory whatever computes.
            n_bytes += device.context + RAM_FOR_ELSE
            n_there, limit = (None, "not known") if there is None else (there.n_bytes, there.limit)
            found.append(Need("memory", n_bytes, n_there, limit, LESS_MEMORY))
        else:
            what = f"memory of {device.name}"
            found.append(Need(what, n_bytes, device.free, device.name, LESS_MEMORY))
    temporary = tempfile.gettempdir()
    free = shutil.disk_usage(temporary).free
    n_bytes = STATES_ON_DISK * context + DISK_FOR_ELSE
    more = f"make room in {temporary}, have TMPDIR name a directory that has it"
    found.append(Need("disk", n_bytes, free, temporary, more))
    return tuple(found)


def _seconds(model: Path, scenarios: Sequence[Scenario], scale: Scale) -> float:
    n_weights = model.stat().st_size
    step_s = max(STEP_S_MIN, n_weights / WEIGHT_BYTES_PER_S)
    n_steps = sum(each.n_steps[scale is Scale.FULL] for each in scenarios)
    n_loads = LOADS + sum(each.n_loads[scale is Scale.FULL] for each in scenarios)
    loads_s = n_loads * n_weights / LOAD_BYTES_PER_S
    return n_steps * step_s + len(scenarios) * SCENARIO_S + loads_s
