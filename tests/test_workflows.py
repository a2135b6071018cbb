"""What the code host runs is what everybody runs: `ci/run`, on a change and by night."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from stages import Stage

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text()


def workflow(name: str) -> Any:
    found = yaml.safe_load((WORKFLOWS / name).read_text())
    found["on"] = found.pop(True)  # YAML 1.1 takes that word for a boolean
    return found


def listed(variable: str) -> list[str]:
    """Return the words of a variable of the Makefile."""
    [words] = re.findall(rf"^{variable} *:= (.*)$", MAKEFILE, re.MULTILINE)
    return str(words).split()


def targets(job: Any) -> list[str]:
    """Return what a job gives to `ci/run`, once for each line of its matrix."""
    said = "\n".join(step.get("run", "") for step in job["steps"])
    [words] = re.findall(r"^(?:sudo .*)?\bci/run (.+)$", said, re.MULTILINE)
    matrix = job.get("strategy", {}).get("matrix", {}).get("stage", [])
    return [
        word for each in matrix or [""] for word in re.sub(r"\$\{\{.*?\}\}", each, words).split()
    ]


def test_stages_of_tests_are_stages_of_make() -> None:
    assert listed("STAGES") == ["lint", "patches", *Stage]


def test_a_change_is_held_against_every_stage_once() -> None:
    ci = workflow("ci.yml")
    assert ci["permissions"] == {"contents": "read"}
    assert {"push", "pull_request", "workflow_call"} == set(ci["on"])
    first, others = ci["jobs"]["first"], ci["jobs"]["tests"]
    assert targets(first) + targets(others) == listed("STAGES")
    assert others["needs"] == "first"
    assert not others["strategy"]["fail-fast"], "all that fails is to be known"


def test_the_engine_is_kept_for_as_long_as_nothing_changes_it() -> None:
    job = workflow("ci.yml")["jobs"]["tests"]
    [cache] = [step["with"] for step in job["steps"] if "cache@" in step.get("uses", "")]
    [hashed] = re.findall(r"hashFiles\((.*)\)", cache["key"])
    assert hashed.split(", ") == ["'builder/**'", "'patches/**'", "'!patches/llama.cpp/**'"]
    [env] = [step["env"] for step in job["steps"] if "env" in step]
    assert env["LLAMACTL_CACHE_DIR"].endswith(cache["path"].removeprefix("~"))


def test_the_night_runs_the_same_and_what_takes_long() -> None:
    nightly = workflow("nightly.yml")
    assert set(nightly["on"]) == {"schedule", "workflow_dispatch"}
    assert nightly["jobs"]["ci"]["uses"] == "./.github/workflows/ci.yml"
    long = nightly["jobs"]["long"]
    assert targets(long) == ["nightly"]
    chowned, kept = long["steps"][-2:]
    assert "upload-artifact@" in kept["uses"]
    assert kept["if"] == chowned["if"] == "always()", "what failed is what one wants to see"
    assert chowned["run"] == f'sudo chown -R "$USER" {kept["with"]["path"]}', "else it is root's"
    assert [kept["with"]["path"]] == listed("REPORTS")


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml"])
def test_every_job_has_the_submodule_and_an_end(name: str) -> None:
    jobs = [job for job in workflow(name)["jobs"].values() if "uses" not in job]
    for job in jobs:
        [checkout] = [step for step in job["steps"] if "checkout@" in step.get("uses", "")]
        assert checkout["with"] == {"submodules": True}
        assert 0 < job["timeout-minutes"] <= 360


@pytest.mark.parametrize("target", [*listed("STAGES"), *listed("NIGHTLY"), "test", "nightly"])
def test_make_has_every_target_that_is_named(target: str) -> None:
    """Without a rule for it, or where a file of this name hid it, nothing would be said to do."""
    told = subprocess.run(
        ["make", "-n", "-o", ".venv/installed", "-o", ".venv/installed-test", target],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"\.venv/bin/|ci/stages", told.stdout)


def test_ci_run_without_a_word_is_make_test() -> None:
    """Whoever calls it only calls it."""
    script = ROOT / "ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "[ $# -gt 0 ] || set -- test\n" in script.read_text()
    assert script.read_text().splitlines()[-1] == 'exec make --keep-going "$@"'
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec ci/run"
