"""Modes of files and directories that no other user of the host may read, whatever the umask."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
#: What SQLite keeps beside a database; it gives new ones the mode of the database.
_SQLITE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")


def make_private_directory(path: Path) -> None:
    """Makes a directory that only its owner may enter. One that exists stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Opens a file, as an `opener` of `open` does, so that only its owner may read and write it.

    One that exists is taken from the others if it is this user's; pipes and devices stay as they are.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) and mode & _OF_OTHERS:
        with suppress(PermissionError):
            os.fchmod(fd, stat.S_IMODE(mode) & ~_OF_OTHERS)
    return fd


def make_private_database(path: Path) -> None:
    """Makes an empty SQLite file, unless there is one, and takes it from the others with what is beside it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR))
    for suffix in _SQLITE_SUFFIXES:
        take_from_others(path.with_name(path.name + suffix))


def take_from_others(path: Path) -> None:
    """Leaves a file to its owner, if it exists and is this user's.

    By its path: a process that closes a file of SQLite's loses SQLite's locks on it.
    """
    with suppress(FileNotFoundError, PermissionError):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & _OF_OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~_OF_OTHERS)
