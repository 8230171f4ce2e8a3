"""Memory of a machine whose files are made here, and of this one."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from edge.memory import measure_memory

MIB = 1 << 20
V2, V1 = "0::/pod/kiln\n", "5:cpu,cpuacct:/other\n4:memory:/pod/kiln\n0::/\n"


def measure(folder: Path, groups: str | None, limits: Mapping[str, str]) -> int:
    """What a process of these groups finds on a machine of 1000 MiB."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:     {1000 << 10} kB\nMemFree:       1024 kB\nHugePages_Total:   0\n")
    if groups is not None:
        (proc / "self/cgroup").write_text(groups)
    for name, text in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(f"{text}\n")
    return measure_memory(proc, cgroups)


@pytest.mark.parametrize("groups", [None, "", V1, V2])
def test_no_limits_leave_the_machine(tmp_path: Path, groups: str | None) -> None:
    assert measure(tmp_path, groups, {}) == 1000 * MIB


@pytest.mark.parametrize(
    ("groups", "limits", "mebibytes"),
    [
        (V2, {"memory.max": "max", "pod/memory.max": "max", "pod/kiln/memory.max": "max"}, 1000),
        (V2, {"pod/kiln/memory.max": str(300 * MIB)}, 300),
        (V2, {"pod/kiln/memory.max": str(3000 * MIB)}, 1000),
        (V2, {"pod/memory.max": str(200 * MIB), "pod/kiln/memory.max": str(300 * MIB)}, 200),
        # A container that sees its own group as the root.
        (V2, {"memory.max": str(100 * MIB)}, 100),
        (V2, {"other/memory.max": str(1 * MIB), "pod/other/memory.max": str(1 * MIB)}, 1000),
        (V1, {"memory/pod/kiln/memory.limit_in_bytes": "9223372036854771712"}, 1000),
        (V1, {"memory/pod/kiln/memory.limit_in_bytes": str(300 * MIB)}, 300),
        (V1, {"memory/pod/memory.limit_in_bytes": str(200 * MIB)}, 200),
        (V1, {"memory/memory.limit_in_bytes": str(100 * MIB)}, 100),
        (V1, {"memory/other/memory.limit_in_bytes": str(1 * MIB)}, 1000),
    ],
)
def test_control_groups(tmp_path: Path, groups: str, limits: dict[str, str], mebibytes: int) -> None:
    assert measure(tmp_path, groups, limits) == mebibytes * MIB


def test_this_machine() -> None:
    assert 0 < measure_memory() <= psutil.virtual_memory().total
