"""Memory that several processes map by its descriptor."""

from __future__ import annotations

import mmap
import os


def map_shared(name: str, size_bytes: int) -> tuple[int, mmap.mmap]:
    """Allocates zeroed memory; returns its descriptor and mapping. If it raises OSError, nothing stays allocated."""
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, size_bytes)
        return fd, mmap.mmap(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
