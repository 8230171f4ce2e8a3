"""How much memory there is, and how much of it one lowering may take."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Final

#: Left to the service, the build processes and everybody else.
_LOWERING_SHARE: Final = 0.75
#: Below this, compiling small models fails already.
_LEAST_LOWERING_BYTES: Final = 4 << 30
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def measure_memory(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Memory of the host, or of the container where that has less, in bytes."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup_limit.read_text().strip()
    except OSError:
        return total_bytes
    return min(total_bytes, int(limit)) if limit.isdecimal() else total_bytes


def choose_lowering_memory(total_bytes: int, num_lowerings: int) -> int:
    """Memory of each of several lowerings at once, in bytes."""
    return max(_LEAST_LOWERING_BYTES, int(total_bytes * _LOWERING_SHARE) // num_lowerings)


def parse_size(text: str) -> int:
    """Bytes of `8GiB` or `8589934592`, for `type=` of an option.

    Raises:
        ArgumentTypeError: It is no size.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,15})(|[KMGT]iB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; accepted: bytes, or a number with KiB, MiB, GiB, TiB")
    return int(match[1]) * _UNITS[match[2]]
