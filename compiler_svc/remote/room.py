"""Room for fetched checkpoints: what goes when they take more than they may, and what stays because it is in use.

All of it holds for several processes at once, and after any of them is killed: the kernel unlocks the files of a
process that ends, and a checkpoint that is removed first takes the name of an unfinished one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from bundle.errors import ResourcesShort
from bundle.host.file_modes import make_private_directory
from compiler_svc.remote.errors import ModelFetchFailed

_RETRY_AFTER_S: Final = 60.0
_POLL_S: Final = 0.01
_RESERVATION: Final = ".room.lock"


@asynccontextmanager
async def using(directory: Path, key: str) -> AsyncIterator[None]:
    """Keeps a checkpoint from removal, fetched or about to be; it counts as used until the end."""
    make_private_directory(directory)
    # A process that removes the checkpoint holds the lock for a moment.
    while (lock := _lock(_use_file(directory, key), fcntl.LOCK_SH)) is None:  # noqa: ASYNC110 - as below
        await asyncio.sleep(_POLL_S)  # the kernel tells no event loop of a lock
    try:
        yield
    finally:
        os.utime(lock)
        os.close(lock)


@contextmanager
def reserving(directory: Path, key: str, size_bytes: int, *, url: str, max_bytes: int | None) -> Iterator[None]:
    """Removes the checkpoints that were used longest ago until another one has room, and reserves the room meanwhile.

    `key` names the checkpoint that is about to be fetched; the caller holds its lock. All may take `max_bytes`.
    """
    if max_bytes is None:
        yield
        return
    if size_bytes > max_bytes:
        detail = (
            f"it has {size_bytes} bytes, and all fetched checkpoints may have {max_bytes} (--fetched-size sets that)"
        )
        raise ModelFetchFailed(url, detail)
    reservation = directory / f".{key}{_RESERVATION}"
    with FileLock(directory / _RESERVATION):
        _remove_until(directory, max_bytes - size_bytes, size_bytes=size_bytes, max_bytes=max_bytes)
        lock = _lock(reservation, fcntl.LOCK_EX)
        assert lock is not None, "only who holds the lock of the checkpoint reserves room for it"
        os.ftruncate(lock, 0)
        os.write(lock, str(size_bytes).encode())
    try:
        yield
    finally:
        reservation.unlink(missing_ok=True)
        os.close(lock)


def part_of(parent: Path, key: str) -> Path:
    """The directory of a checkpoint that is not whole: one that is being fetched, or removed. `lock_of` guards it."""
    return parent / f".{key}.part"


def lock_of(part: Path) -> FileLock:
    """The lock of `part_of` a checkpoint."""
    return FileLock(part.with_suffix(".lock"))


def _remove_until(directory: Path, goal_bytes: int, *, size_bytes: int, max_bytes: int) -> None:
    kept = {path: _measure(path) for path in directory.iterdir() if _is_whole(path)}
    used_bytes = sum(kept.values()) + sum(_list_reservations(directory))
    for path in sorted(kept, key=lambda one: _last_use(directory, one)):
        if used_bytes <= goal_bytes:
            return
        if _remove(directory, path.name):
            used_bytes -= kept[path]
    if used_bytes > goal_bytes:
        detail = f"{size_bytes} bytes to fetch, {max_bytes} for all, {used_bytes} in use (--fetched-size)"
        raise ResourcesShort("room for fetched checkpoints", detail, _RETRY_AFTER_S)


def _remove(directory: Path, key: str) -> bool:
    """Removes a checkpoint; returns whether it did, which it does not if the checkpoint is in use."""
    use_file, part = _use_file(directory, key), part_of(directory, key)
    lock = _lock(use_file, fcntl.LOCK_EX)
    if lock is None:
        return False
    try:
        with lock_of(part).acquire(timeout=0):
            try:
                shutil.rmtree(part, ignore_errors=True)
                (directory / key).rename(part)
                use_file.unlink(missing_ok=True)
            finally:
                os.close(lock)
            shutil.rmtree(part, ignore_errors=True)
    except Timeout:
        os.close(lock)
        return False
    return True


def _lock(path: Path, kind: int) -> int | None:
    """Locks a file, which it makes; returns the descriptor that holds the lock, or None if others have locked it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            # Another process may have removed the file in between.
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _list_reservations(directory: Path) -> Iterator[int]:
    """Yields the sizes of checkpoints that are being fetched; removes reservations of processes that have ended."""
    for path in directory.glob(f".*{_RESERVATION}"):
        if _is_whole(directory / path.name.removeprefix(".").removesuffix(_RESERVATION)):
            continue
        lock = _lock(path, fcntl.LOCK_EX)
        if lock is None:
            with suppress(OSError, ValueError):
                yield int(path.read_text())
        else:
            path.unlink(missing_ok=True)
            os.close(lock)


def _is_whole(path: Path) -> bool:
    # Outlines of plans are in a folder of their own, which has no name of a checkpoint.
    return path.is_dir() and all(character in "0123456789abcdef" for character in path.name)


def _last_use(directory: Path, path: Path) -> int:
    for one in (_use_file(directory, path.name), path):
        with suppress(OSError):
            return one.stat().st_mtime_ns
    return 0


def _measure(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _use_file(directory: Path, key: str) -> Path:
    return directory / f".{key}.use.lock"
