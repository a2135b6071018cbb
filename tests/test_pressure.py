"""How short of memory the machine is: the kernel's files, and what is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import pressure

if TYPE_CHECKING:
    from pathlib import Path

LINES = "some avg10={} avg60=1.00 avg300=0.00 total=53302\nfull avg10=99.00 avg60=0 total=1\n"


def measured(root: Path, system: str | None, **groups: str) -> float | None:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "pressure").mkdir(parents=True)
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("3:memory:/old\n0::/a.slice/b.service\n")
    if system is not None:
        (proc / "pressure" / "memory").write_text(system)
    (cgroups / "a.slice" / "b.service").mkdir(parents=True)
    where = {"root": cgroups, "a": cgroups / "a.slice", "b": cgroups / "a.slice" / "b.service"}
    for name, text in groups.items():
        (where[name] / "memory.pressure").write_text(text)
    return pressure.memory(proc, cgroups)


@pytest.mark.parametrize("where", ["a", "b"])
def test_the_highest_on_the_path_counts(tmp_path: Path, where: str) -> None:
    found = measured(tmp_path, LINES.format("1.50"), **{where: LINES.format("12.25")})
    assert found == 12.25


def test_the_machine_counts_where_no_group_measures(tmp_path: Path) -> None:
    assert measured(tmp_path, LINES.format("1.50")) == 1.5


@pytest.mark.parametrize("text", [None, "", "some\n", "some avg10=much\n", "full avg10=1.0\n"])
def test_what_is_not_measured_is_not_known(tmp_path: Path, text: str | None) -> None:
    assert measured(tmp_path, text) is None
