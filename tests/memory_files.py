"""The memory files that a process holds: descriptors, and mappings, which outlive them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_MEMFD: Final = "/memfd:"
_GONE: Final = " (deleted)"


def list_opened(pid: int) -> Iterator[str]:
    """The name of the memory file of each descriptor that has one."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if (target := str(link.readlink())).startswith(_MEMFD):
                yield name_memory_file(target)


def list_mapped(pid: int) -> Iterator[str]:
    """The names of the memory files that a process has mapped, each file once."""
    # Address, permissions, offset, device, inode, path.
    fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if _MEMFD in line)
    yield from {inode: name_memory_file(path) for *_, inode, path in fields}.values()


def name_memory_file(path: str) -> str:
    """The name that a memory file was made with."""
    return path.removeprefix(_MEMFD).removesuffix(_GONE)


def count_held(name: str) -> int:
    """How many descriptors and mappings of memory files of a name this process has."""
    return [*list_opened(os.getpid()), *list_mapped(os.getpid())].count(name)
