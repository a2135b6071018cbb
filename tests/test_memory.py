"""What is left of the system's memory and of every limit on the path of control groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor.memory import Available, available

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


class Machine:
    """A /proc and a /sys/fs/cgroup of our own."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.put(self.proc / "meminfo", "MemTotal: 8192 kB\nMemAvailable:    4096 kB\n")

    @staticmethod
    def put(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, limit: str, used: int, idle: int = 0) -> None:
        """Put a group of the second version there."""
        self.put(self.groups / path / "memory.max", f"{limit}\n")
        self.put(self.groups / path / "memory.current", f"{used}\n")
        self.put(self.groups / path / "memory.stat", f"anon 1\ninactive_file {idle}\n")

    def left(self, ends: int | None = None) -> Available | None:
        return available(ends, proc=self.proc, groups=self.groups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups_it_is_what_the_system_has(machine: Machine) -> None:
    assert machine.left() == Available(4 * MIB, "the system's available memory")


def test_the_smallest_limit_on_the_path_counts(machine: Machine) -> None:
    machine.put(machine.proc / "self" / "cgroup", "0::/a.slice/b.service\n")
    machine.group("a.slice", str(3 * MIB), 2 * MIB, idle=MIB)
    machine.group("a.slice/b.service", "max", 0)
    found = machine.left()
    assert found is not None
    assert (found.n_bytes, found.limit) == (
        2 * MIB,
        f"the memory limit of {3 * MIB} bytes of control group /a.slice",
    )
    machine.group("a.slice/b.service", str(MIB), 2 * MIB)
    found = machine.left()
    assert found is not None
    assert (found.n_bytes, found.limit.endswith("/a.slice/b.service")) == (0, True)


def test_in_a_container_the_root_is_the_own_group(machine: Machine) -> None:
    machine.put(machine.proc / "self" / "cgroup", "0::/\n")
    machine.group("", str(2 * MIB), MIB)
    found = machine.left()
    assert found is not None
    assert found.n_bytes == MIB


def test_a_group_of_the_first_version_counts_too(machine: Machine) -> None:
    machine.put(machine.proc / "self" / "cgroup", "5:cpuset:/x\n4:cpu,memory:/a\n0::/\n")
    for path, limit in (("", 2**63 - 4096), ("a", 2 * MIB)):
        group = machine.groups / "memory" / path
        machine.put(group / "memory.limit_in_bytes", str(limit))
        machine.put(group / "memory.usage_in_bytes", str(MIB))
        machine.put(group / "memory.stat", "total_inactive_file 4096\n")
    found = machine.left()
    assert found is not None
    assert found.n_bytes == MIB + 4096


def test_the_groups_are_those_of_the_process_that_is_asked_for(machine: Machine) -> None:
    machine.put(machine.proc / "7" / "cgroup", "0::/a\n")
    machine.group("a", str(2 * MIB), MIB)
    assert machine.left() == Available(4 * MIB, "the system's available memory")
    found = available(to=7, proc=machine.proc, groups=machine.groups)
    assert found is not None
    assert found.n_bytes == MIB


def test_what_a_process_has_for_itself_is_free_once_it_is_gone(machine: Machine) -> None:
    machine.put(machine.proc / "7" / "status", "VmRSS: 9 kB\nRssAnon:  1024 kB\nRssFile: 8 kB\n")
    found = machine.left(7)
    assert found is not None
    assert found.n_bytes == 5 * MIB
    assert machine.left(8) == machine.left()


@pytest.mark.parametrize("text", ["", "MemAvailable: lots kB\n", "MemAvailable\n", "\0\n"])
def test_what_makes_no_sense_is_not_known(machine: Machine, text: str) -> None:
    machine.put(machine.proc / "meminfo", text)
    machine.put(machine.proc / "self" / "cgroup", "0\n::\n0::/../../etc\n")
    machine.group("", "many", 3)
    assert machine.left() is None


def test_this_machine_says_something() -> None:
    found = available()
    assert found is not None
    assert found.n_bytes > 0
