"""Measures how much memory this process may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def measure_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Returns the machine's memory in bytes, or the lowest limit of this process's control groups if that is lower.

    Control groups are mounted at `cgroups`; those of version 1 have a folder for each controller.
    """
    return min((_read_total(proc), *_read_limits(proc, cgroups)))


def _read_total(proc: Path) -> int:
    sizes = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(sizes["MemTotal"].split()[0]) << 10


def _read_limits(proc: Path, cgroups: Path) -> list[int]:
    texts = [file.read_text().strip() for file in _list_limit_files(proc, cgroups) if file.is_file()]
    # Version 2 writes `max` if a group has no limit.
    return [int(text) for text in texts if text.isdecimal()]


def _list_limit_files(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yields the limit files of this process's groups and of their parents; some may not exist."""
    groups = proc / "self/cgroup"
    # Some kernels have no control groups.
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)
        # The path is the host's. A container may see its own group as the root, which is a parent of every group.
        path = Path(group)
        folders = [one.relative_to("/") for one in (path, *path.parents)]
        if not controllers:
            yield from (cgroups / folder / "memory.max" for folder in folders)
        elif "memory" in controllers.split(","):
            yield from (cgroups / "memory" / folder / "memory.limit_in_bytes" for folder in folders)
