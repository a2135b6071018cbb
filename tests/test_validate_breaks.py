"""Engines that lose something in a change and answer as if they had not: validation says what."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from llamactl_validate.engine import N_CTX
from llamactl_validate.runner import Verdict, run
from llamactl_validate.scenario import Engines, Scale
from llamactl_validate.suites import scenarios
from llamactl_validate.suites.identity import NO_CHECKPOINTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiny_models import TinyModels

DRAWN, BYTES, TURNS = PANEL = ("identity.sampled", "identity.states", "identity.checkpoints")
"""Generations that draw, states as they are in memory, and what they are rolled back to."""
RUN = "failed: the run with changes: "
ONE_CHANGE = "failed: a change to {[^}]*}: "
OTHER_BYTES = r"not so: the \d+ bytes of slot 0's state are the same"
LOADED_AGAIN = "how often the weights were loaded: 2 instead of 1"
WHOLE = {TURNS: f"skipped: {NO_CHECKPOINTS}"}
"""What is said where nothing is lost, and the model needs no checkpoints."""
BREAKS = {
    "lose_checkpoint": WHOLE,
    # The engine sees by itself that a generation is not where its state is.
    "swap_slots": WHOLE
    | {
        DRAWN: RUN + "a stream tells of an error: .*Invalid input batch.*",
        BYTES: ONE_CHANGE + OTHER_BYTES,
    },
    "truncate_state": WHOLE
    | {
        DRAWN: RUN + r"(texts|tokens|logprobs) of the generations\[\d\].*",
        BYTES: ONE_CHANGE + OTHER_BYTES,
    },
    "reseed_sampler": WHOLE | {DRAWN: RUN + r"(texts|tokens) of the generations\[\d\].*"},
    "reload_weights": WHOLE | {DRAWN: RUN + LOADED_AGAIN, BYTES: ONE_CHANGE + LOADED_AGAIN},
}
"""A step at which the engine breaks, and what is said of each scenario that does not pass."""
MOVED = "failed: two conversations are moved, parked and placed: "
BREAKS_OF_A_HYBRID = {
    "none": {},
    "lose_checkpoint": {TURNS: MOVED + r"bytes of their checkpoints: \S+ instead of \S+"},
    "truncate_state": {BYTES: ONE_CHANGE + OTHER_BYTES},
    "reload_weights": {BYTES: ONE_CHANGE + LOADED_AGAIN, TURNS: MOVED + LOADED_AGAIN},
}
"""Of a model that has checkpoints. It is so fast that a generation ends before a change comes."""
LONG_WINDOW = ("--override-kv", f"qwen35.context_length=int:{8 * N_CTX}")


def broken(at: Path, engine: Path, step: str, *options: str) -> Path:
    """Return a program that runs this engine, so that it breaks each change at this step."""
    faults = at / "faults"
    faults.write_text(f"{step} 1\n")
    program = at / "broken-engine"
    command = f'exec {shlex.quote(str(engine))} "$@" {shlex.join(options)}'
    set_faults = f"export LLAMA_SERVER_TEST_FAULTS={shlex.quote(str(faults))}"
    program.write_text(f"#!/bin/sh\n{set_faults}\n{command}\n")
    program.chmod(0o700)
    return program


def said(program: Path, model: Path, *names: str) -> dict[str, str]:
    """Run scenarios; return what is said of each that does not pass."""
    panel = [each for each in scenarios() if each.id in names]
    engines = Engines(program, model, idle=False)
    rows = run(panel, engines, Scale.QUICK, lambda *_: None)
    return {
        row.scenario.id: f"{row.verdict}: {row.why}"
        for row in rows
        if row.verdict is not Verdict.PASSED
    }


def check(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Find each of these lines where it is wanted, and no other."""
    assert found.keys() == wanted.keys(), found
    for name, line in wanted.items():
        assert re.fullmatch(line, found[name], re.DOTALL), found[name]


@pytest.mark.parametrize("step", BREAKS)
def test_a_break_is_seen_at_its_line(
    tools_dir: Path, model_path: Path, tmp_path: Path, step: str
) -> None:
    program = broken(tmp_path, tools_dir / "llama-server-faults", step)
    check(said(program, model_path, *PANEL), BREAKS[step])


@pytest.mark.parametrize("step", BREAKS_OF_A_HYBRID)
def test_a_break_of_a_model_with_checkpoints_is_seen(
    tools_dir: Path, tiny: TinyModels, tmp_path: Path, step: str
) -> None:
    program = broken(tmp_path, tools_dir / "llama-server-faults", step, *LONG_WINDOW)
    found = said(program, tiny.model("qwen35-dense"), BYTES, TURNS)
    check(found, BREAKS_OF_A_HYBRID[step])
