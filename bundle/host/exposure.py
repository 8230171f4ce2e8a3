"""Finds out who else may change a file that is about to be mapped or run.

A digest says what a file's bytes were when they were read. Mapped pages are the file's own: a user who may write the
file changes them later, and one who may write its directory puts another file in its place in between.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

_OTHER_WRITERS: Final = {stat.S_IWGRP: "its group", stat.S_IWOTH: "everybody"}


class FileStamp(NamedTuple):
    """What changes when a file's bytes do; the other times of a file also change with its names and its mode."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Reads the stamp of a file; raises OSError if there is none."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def has_changed(self, path: Path) -> bool:
        """Whether the file's bytes have been written since. A file that is gone or replaced keeps its mapped pages."""
        try:
            now = FileStamp.of(path)
        except OSError:
            return False
        return now != self and (now.device, now.inode) == (self.device, self.inode)


def describe_exposure(path: Path) -> str | None:
    """Says how users other than this one and root may change a file, such as "its directory can be written by its
    group"; None if none may. Raises OSError if there is no such file.

    Looks at the owners and modes of the file and its directory; an access list shows in the mode of the group. On a
    file system that is mounted read-only all files are safe, of any owner.
    """
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return None
    for subject, place in (("file", path), ("directory", path.parent)):
        status = place.stat()
        if status.st_uid not in {os.geteuid(), 0}:
            return f"its {subject} belongs to user {status.st_uid}"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
            # Others may add files to such a directory, but not replace ours.
            continue
        for bit, writers in _OTHER_WRITERS.items():
            if status.st_mode & bit:
                return f"its {subject} can be written by {writers}"
    return None


def close_to_others(directory: Path) -> None:
    """Takes the right to write from group and others, if the directory is this user's."""
    status = directory.stat()
    closed = stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid == os.geteuid() and closed != stat.S_IMODE(status.st_mode):
        directory.chmod(closed)
