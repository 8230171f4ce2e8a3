"""Names the shortages of a host, which pass by themselves once it has room again, and repeats what met one."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from bundle.errors import ResourcesShort
from bundle.host.backoff import backoff_delays

RETRY_AFTER_S: Final = 30.0
#: Seconds between the tries of a call that someone waits for.
BRIEF_DELAYS_S: Final = (0.5, 1.0, 2.0)
#: Seconds between the tries of what is given up only when its process ends: the first, doubled up to the second.
_FIRST_DELAY_S: Final = 0.25
_MAX_DELAY_S: Final = 8.0

#: What the host is short of, by number of the error. EAGAIN is not among them: locks answer with it, too.
_RESOURCES: Final = {
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk space within the quota",
    errno.EFBIG: "disk space within the limit of a file",
    errno.EMFILE: "descriptors of this process",
    errno.ENFILE: "descriptors",
    errno.ETOOMANYREFS: "descriptors that are on their way between processes",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory of the kernel",
}
#: What a start of a process or thread lacks besides.
_START_RESOURCES: Final = {**_RESOURCES, errno.EAGAIN: "processes and threads"}
#: What SQLite lacks, by its code. Python raises MemoryError for a lack of memory.
_SQLITE_RESOURCES: Final = {
    sqlite3.SQLITE_FULL: "disk space",
    # The memory that the users of a database share is a file beside it.
    sqlite3.SQLITE_IOERR_SHMSIZE: "disk space",
    sqlite3.SQLITE_IOERR_NOMEM: "memory",
}
#: Python raises a plain RuntimeError if the kernel has no room for a thread.
_NO_THREAD: Final = "can't start new thread"

ResultT = TypeVar("ResultT")


def name_shortage(error: BaseException, *, of_start: bool = False) -> ResourcesShort | None:
    """The named error of a shortage, without the paths that the error has; None for any other error.

    A ResourcesShort stays as it is. In errors of a process's start (`of_start`), EAGAIN is a shortage, too.
    """
    match error:
        case ResourcesShort():
            return error
        case sqlite3.Error():
            return _name_shortage_of_sqlite(error)
        case OSError():
            resource = (_START_RESOURCES if of_start else _RESOURCES).get(error.errno or 0)
            return None if resource is None else _short(resource, os.strerror(error.errno or 0))
        case MemoryError():
            return _short("memory", os.strerror(errno.ENOMEM))
        case RuntimeError() if str(error) == _NO_THREAD:
            return _short(_START_RESOURCES[errno.EAGAIN], os.strerror(errno.EAGAIN))
    return None


def find_shortage(error: Exception) -> ResourcesShort | None:
    """As `name_shortage`, also for errors of libraries in other languages, which quote the operating system."""
    words = ((os.strerror(number), resource) for number, resource in _RESOURCES.items())
    quoted = (_short(resource, detail) for detail, resource in words if detail in str(error))
    return name_shortage(error) or next(quoted, None)


@contextmanager
def naming_shortages(*, of_start: bool = False) -> Iterator[None]:
    """Raises ResourcesShort in place of a shortage that the block meets (see `name_shortage`); other errors pass."""
    try:
        yield
    except Exception as error:
        shortage = name_shortage(error, of_start=of_start)
        if shortage is None or shortage is error:
            raise
        raise shortage from error


async def outlast_shortages(
    attempt: Callable[[], Awaitable[ResultT]],
    delays_s: Iterable[float] | None = None,
    *,
    on_shortage: Callable[[ResourcesShort], None] = lambda _: None,
) -> ResultT:
    """Makes an attempt, and makes it again after each delay as long as the host is short of something.

    If the last attempt meets a shortage too, raises ResourcesShort.

    Args:
        attempt: May be made several times. What it has taken from the host it gives back if it fails.
        delays_s: Seconds before each further attempt; None takes `BRIEF_DELAYS_S`.
        on_shortage: Called before each delay.
    """
    for delay_s in BRIEF_DELAYS_S if delays_s is None else delays_s:
        try:
            with naming_shortages():
                return await attempt()
        except ResourcesShort as shortage:
            on_shortage(shortage)
        await asyncio.sleep(delay_s)
    with naming_shortages():
        return await attempt()


def lasting_delays() -> Iterator[float]:
    """Yields seconds between tries without end: they double up to about 8."""
    return backoff_delays(_FIRST_DELAY_S, _MAX_DELAY_S)


def _short(resource: str, detail: str) -> ResourcesShort:
    return ResourcesShort(resource, detail, RETRY_AFTER_S)


def _name_shortage_of_sqlite(error: sqlite3.Error) -> ResourcesShort | None:
    # Errors that Python's module raises itself have no code.
    code = getattr(error, "sqlite_errorcode", None)
    if code in _SQLITE_RESOURCES:
        return _short(_SQLITE_RESOURCES[code], f"SQLite says {error}")
    # SQLite does not say why it cannot open a file.
    if code == sqlite3.SQLITE_CANTOPEN and (shortage := _find_lack_of_descriptors()) is not None:
        return shortage
    return None


def _find_lack_of_descriptors() -> ResourcesShort | None:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return name_shortage(error)
    return None
