"""One compiler per store: a second one would end the first one's operations as interrupted."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler_svc.errors import StoreLocked


@contextmanager
def lock_store(store: Path) -> Iterator[None]:
    """Holds a store as long as the context lasts; the kernel frees it when the process dies.

    Raises:
        StoreLocked: Another process holds it.
    """
    store.mkdir(parents=True, exist_ok=True)
    fd = os.open(store / "compiler.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StoreLocked(str(store)) from error
    try:
        yield
    finally:
        os.close(fd)
