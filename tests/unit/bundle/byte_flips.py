"""Flipping single bytes of a file, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def flip_bytes(path: Path, offsets: Iterable[int]) -> Iterator[int]:
    """Yields with one byte of a file changed, for each offset; the file is whole again afterwards.

    A bit is flipped that depends on the offset, so that every bit is tried.
    """
    path.chmod(0o644)
    fd = os.open(path, os.O_RDWR)
    try:
        for offset in offsets:
            byte = os.pread(fd, 1, offset)
            os.pwrite(fd, bytes([byte[0] ^ 1 << offset % 8]), offset)
            try:
                yield offset
            finally:
                os.pwrite(fd, byte, offset)
    finally:
        os.close(fd)
