"""What the processes of both services may do: one row for each kind of process, and the call that sets the limits.

Bundles, checkpoints and prompts come from strangers. A process that one of them has taken over should gain no
privileges, fill no disk, and read no other process's memory; and none that ends by a fault may write its memory, with
prompts and weights, to a disk.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Final

import msgspec

# From linux/prctl.h.
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38

# No file is so short, so none is written; and fs/coredump.c of Linux takes 1 to say that no program gets the core
# either, while 0 does not bind the programs that `kernel.core_pattern` may name.
_CORE_SIZE_BYTES: Final = 1

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a process. All that it starts has them too, but for `is_private`, which ends with a new program.

    A process that has set them can no longer widen them. Every confined process is also without core dumps, and no
    program that it runs gains privileges, as those with the set-user-ID bit would.

    Attributes:
        open_files: Descriptors that it may have open at once; None for as many as before.
        file_size_bytes: Size of the largest file that it may write; None for as large as before.
        data_bytes: Data memory, as RLIMIT_DATA counts it; None for as much as before.
        is_private: Whether other processes of the same user may not trace it, nor read its memory and descriptors.
    """

    open_files: int | None = None
    file_size_bytes: int | None = None
    data_bytes: int | None = None
    is_private: bool = False


#: The services themselves, and forkservers: what holds for all kinds.
SERVICE: Final = Confinement()

#: Ranks hold weights and the keys and values of prompts. They map files and write none.
RANK: Final = Confinement(open_files=1024, is_private=True)

#: Text processes hold prompts and answers. Their memory is an option of the service.
TEXT: Final = Confinement(open_files=256, is_private=True)

#: Builds read checkpoints of hundreds of files, and write weights of any size.
BUILD: Final = Confinement(open_files=4096)

#: A lowering, with the C++ compiler that it starts, writes code and no weights. Its memory is an option of the service.
LOWERING: Final = Confinement(open_files=1024, file_size_bytes=4 << 30)

#: Planning processes read headers. `PlanningLimits` has their memory.
PLAN: Final = Confinement(open_files=1024)


def confine(confinement: Confinement) -> None:
    """Sets the limits of this process. Those that it has already and that are lower stay.

    Raises MemoryError if the process has more data memory than it may have, OSError if the kernel refuses.
    """
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    for limited, value in (
        (resource.RLIMIT_CORE, _CORE_SIZE_BYTES),
        (resource.RLIMIT_NOFILE, confinement.open_files),
        (resource.RLIMIT_FSIZE, confinement.file_size_bytes),
    ):
        if value is not None:
            _limit(limited, value)
    if confinement.data_bytes is not None:
        used_bytes = measure_data()
        if used_bytes > confinement.data_bytes:
            raise MemoryError(f"{used_bytes} bytes of data from the start, of at most {confinement.data_bytes}")
        _limit(resource.RLIMIT_DATA, confinement.data_bytes)
    if confinement.is_private:
        _control(_PR_SET_DUMPABLE, 0)


def _limit(limited: int, value: int) -> None:
    _, hard = resource.getrlimit(limited)
    lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limited, (lower, lower))


def measure_data() -> int:
    """Returns the data memory of this process, in bytes; 0 if the kernel does not say."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])


def _control(option: int, value: int) -> None:
    if _LIBC.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
