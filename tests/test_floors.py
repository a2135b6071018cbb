"""The tree is what it says it is: imports go downward, and two parts see almost nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import llamactl_supervisor

ROOT = Path(__file__).parents[1]
SUPERVISOR = ROOT / "supervisor" / "llamactl_supervisor"
CLI = ROOT / "cli" / "llamactl_cli"
SEEN_BY_CLI = {"errors", "config", "models", "client"}
APART = {"holder"}


def floors() -> dict[str, int]:
    """Read the floor plan out of the package's docstring: it cannot go stale unnoticed."""
    assert llamactl_supervisor.__doc__ is not None
    plan: dict[str, int] = {}
    for line in llamactl_supervisor.__doc__.splitlines():
        title, _, modules = line.strip().partition(": ")
        if title[:1].isdigit():
            plan |= dict.fromkeys(modules.split(), int(title[0]))
    return plan


def imported(path: Path) -> set[str]:
    """Return every module that the file names in an import, with `from a import b` as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    """Return the modules of the supervisor that the file imports."""
    prefix = "llamactl_supervisor."
    return {
        name.removeprefix(prefix).split(".")[0]
        for name in imported(path)
        if name.startswith(prefix)
    }


def test_every_module_has_a_floor() -> None:
    modules = {path.stem for path in SUPERVISOR.glob("*.py")} - {"__init__"} - APART
    assert modules == set(floors())


def test_imports_go_downward() -> None:
    """Only the pure floor may import sideways, and only without a cycle."""
    plan = floors()
    for module, floor in plan.items():
        for name in ours(SUPERVISOR / f"{module}.py"):
            sideways = floor == plan[name] == 0
            assert plan[name] < floor or sideways, f"{module} imports {name}"


def test_the_pure_floor_has_no_cycle() -> None:
    pure = {name for name, floor in floors().items() if floor == 0}
    edges = {name: ours(SUPERVISOR / f"{name}.py") for name in pure}
    while edges:
        free = {name for name, needs in edges.items() if not needs & set(edges)}
        assert free, f"a cycle among {sorted(edges)}"
        edges = {name: needs for name, needs in edges.items() if name not in free}


def test_the_command_sees_four_modules() -> None:
    for path in CLI.glob("**/*.py"):
        assert ours(path) <= SEEN_BY_CLI, path


def test_the_holder_stands_alone() -> None:
    for name in imported(SUPERVISOR / "holder.py"):
        assert name.split(".")[0] in sys.stdlib_module_names, name
