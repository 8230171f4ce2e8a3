"""Reads files that others may change, replace or take away meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from bundle.errors import KilnError
from bundle.host.shortage import name_shortage


@contextmanager
def reading(refuse: Callable[[str], KilnError]) -> Iterator[None]:
    """Names what the operating system refuses to the block, which reads files that others may change.

    Raises `ResourcesShort` if the host is short of something. Otherwise raises what `refuse` makes of the system's
    words, which have no path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            # Not of the operating system: a caller that has left ends the work so.
            raise
        raise name_shortage(error) or refuse(error.strerror or str(error)) from error


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for reading, without a buffer; raises OSError if there is none.

    No link: a directory that another user filled must not lead out of itself. No waiting: it may hold a pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb", buffering=0)
    os.close(fd)
    raise OSError(errno.EINVAL, "no regular file", str(path))
