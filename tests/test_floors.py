"""The tree is what it says it is: imports go downward, and two parts see almost nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import llamactl_bench
import llamactl_cli
import llamactl_supervisor
import llamactl_validate
import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
SUPERVISOR = ROOT / "supervisor" / "llamactl_supervisor"
CLI = ROOT / "cli" / "llamactl_cli"
VALIDATE = ROOT / "validate" / "llamactl_validate"
TO_ASK_A_DAEMON = {"errors", "config", "models", "client"}
WITHOUT_A_DAEMON = {
    *("spawn", "groundwork", "memory", "locks", "ledger", "procfs", "remains", "reap", "logs"),
}
"""To start one, and whether one could; what the last one left, as it was written; its end."""
TO_RELAY = {"hold"}
"""What `llamactl run` shares with the daemon: a way to the engine's socket."""
APART = {"holder"}
BELOW = {
    "builder": set[str](),
    "supervisor": set[str](),
    "validate": {"supervisor"},
    "bench": {"supervisor", "validate"},
    "cli": {"builder", "supervisor", "validate", "bench"},
}
"""Which other package each may import."""
RUN_AS_A_PROGRAM = {"pip"}


def floors(package: ModuleType = llamactl_supervisor) -> dict[str, int]:
    """Read the floor plan out of the package's docstring: it cannot go stale unnoticed."""
    assert package.__doc__ is not None
    plan: dict[str, int] = {}
    for line in package.__doc__.splitlines():
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


def modules() -> dict[str, list[Path]]:
    """Return the files of every module; one that is a package is one module."""
    found = {path.stem: [path] for path in SUPERVISOR.glob("[a-z]*.py")}
    found |= {
        path.parent.name: list(path.parent.glob("*.py"))
        for path in SUPERVISOR.glob("*/__init__.py")
    }
    return found | {"__main__": [SUPERVISOR / "__main__.py"]}


def needs(module: str) -> set[str]:
    """Return the other modules that the module imports."""
    return set().union(*map(ours, modules()[module])) - {module}


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    found = set().union(*map(imported, (ROOT / package / f"llamactl_{package}").rglob("*.py")))
    tops = {name.split(".")[0] for name in found}
    ours = {name.removeprefix("llamactl_") for name in tops if name.startswith("llamactl_")}
    assert ours - {package} <= BELOW[package]


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split("[^a-z-]", line)[0] for line in project["dependencies"]}
    files = [path for package in BELOW for path in (ROOT / package).rglob("*.py")]
    found = {name.split(".")[0] for path in files for name in imported(path)}
    assert {name.replace("-", "_") for name in declared - RUN_AS_A_PROGRAM} <= found


def test_every_module_has_a_floor() -> None:
    assert set(modules()) - APART == set(floors())


def test_imports_go_downward() -> None:
    """Only the pure floor may import sideways, and only without a cycle."""
    plan = floors()
    for module, floor in plan.items():
        for name in needs(module):
            sideways = floor == plan[name] == 0
            assert plan[name] < floor or sideways, f"{module} imports {name}"


def test_the_pure_floor_has_no_cycle() -> None:
    pure = {name for name, floor in floors().items() if floor == 0}
    edges = {name: needs(name) for name in pure}
    while edges:
        free = {name for name, below in edges.items() if not below & set(edges)}
        assert free, f"a cycle among {sorted(edges)}"
        edges = {name: below for name, below in edges.items() if name not in free}


def test_the_shim_stands_alone() -> None:
    """The standard library, its own parts and a leaf: it starts for every start of a server."""
    shim = [CLI / "shim.py", *sorted((CLI / "run").glob("*.py"))]
    assert len(shim) > 5
    for path in shim:
        for name in imported(path):
            ours = name.startswith(
                ("llamactl_cli.run", "llamactl_cli.shim", "llamactl_supervisor.hold")
            )
            assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{path}: {name}"


def test_the_door_to_the_shim_imports_no_parser() -> None:
    code = "import sys; from llamactl_cli.main import main; main(['run', '--help']); "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "llamactl_cli.shim" in loaded
    heavy = {"typer", "click", "rich", "httpx", "pydantic", "llamactl_supervisor.models"}
    assert not loaded & heavy


def test_every_module_of_the_command_is_in_its_plan() -> None:
    assert llamactl_cli.__doc__ is not None
    named = {line.split()[0] for line in llamactl_cli.__doc__.splitlines() if line[:4] == " " * 4}
    found = {path.stem for path in CLI.glob("[a-z]*.py")}
    found |= {f"{path.parent.name}/" for path in CLI.glob("*/__init__.py")} - {"run/"}
    assert named == found


def test_the_command_asks_a_daemon_or_does_without() -> None:
    for path in CLI.glob("**/*.py"):
        assert ours(path) <= TO_ASK_A_DAEMON | WITHOUT_A_DAEMON | TO_RELAY, path


@pytest.mark.parametrize("package", [llamactl_validate, llamactl_bench])
def test_what_measures_goes_downward_and_knows_no_command_and_no_test(package: ModuleType) -> None:
    plan, prefix = floors(package), f"{package.__name__}."
    home = Path(str(package.__file__)).parent
    files = {path.stem: [path] for path in home.glob("[a-z]*.py")}
    files |= {path.parent.name: list(path.parent.glob("*.py")) for path in home.glob("*/*.py")}
    assert files.keys() == plan.keys()
    for module, paths in files.items():
        names = set().union(*map(imported, paths))
        assert not {name.split(".")[0] for name in names} & {"llamactl_cli", "pytest", "sandbox"}
        for name in names:
            below = name.removeprefix(prefix).split(".")[0]
            if name.startswith(prefix) and below != module:
                assert plan[below] < plan[module], f"{module} imports {name}"


def test_validate_does_not_know_bench() -> None:
    for path in VALIDATE.glob("**/*.py"):
        assert not {name for name in imported(path) if name.startswith("llamactl_bench")}, path


@pytest.mark.parametrize("command", ["validate", "bench"])
def test_the_command_imports_what_measures_only_when_it_does(command: str) -> None:
    package = f"llamactl_{command}"
    for path in CLI.glob("**/*.py"):
        names = {name.split(".")[0] for name in imported(path)}
        assert path.parent.name == "commands" or package not in names, path
    for node in ast.parse((CLI / "commands" / f"{command}.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.module.startswith(("llamactl_bench", "llamactl_validate"))


def test_what_is_optional_is_imported_where_it_is_used() -> None:
    for path in (ROOT / "bench" / "llamactl_bench").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            assert not (isinstance(node, ast.ImportFrom) and "matplotlib" in str(node.module))


def test_the_holder_and_what_the_shim_shares_stand_alone() -> None:
    for module in ("holder", "hold"):
        for name in imported(SUPERVISOR / f"{module}.py"):
            assert name.split(".")[0] in sys.stdlib_module_names, f"{module}: {name}"
