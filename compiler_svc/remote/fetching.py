"""Fetches checkpoints into a directory: whole ones appear there, or none."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Final

from filelock import Timeout

from bundle.errors import ResourcesShort
from bundle.host.file_modes import make_private_directory
from compiler_svc.remote.errors import ModelFetchFailed
from compiler_svc.remote.listing import RemoteCheckpoint, RemoteFile, list_checkpoint, naming_failures
from compiler_svc.remote.room import lock_of, part_of, reserving

_OUTLINES: Final = "outlines"
#: Read and written at once.
_CHUNK_BYTES: Final = 8 << 20
#: Of one safetensors file: the format's own limit.
_MAX_HEADER_BYTES: Final = 100_000_000
#: Of all that is read for one plan.
MAX_OUTLINE_BYTES: Final = 1 << 30
_RETRY_AFTER_S: Final = 60.0


def fetch_outline(url: str, prefixes: tuple[str, ...], directory: Path) -> Path:
    """Fetches what a plan reads: small files, headers of safetensors; the tensors, and pickles, are holes in the files.

    Takes a URL from `check_url`; returns a directory that `Checkpoint.open` reads, named by the checkpoint's key.
    """
    checkpoint = list_checkpoint(url, prefixes)
    left = MAX_OUTLINE_BYTES

    def take(size_bytes: int) -> int:
        nonlocal left
        left -= size_bytes
        if left < 0:
            raise ModelFetchFailed(url, f"its headers and small files have more than {MAX_OUTLINE_BYTES} bytes")
        return size_bytes

    def copy(file: RemoteFile, source: BinaryIO, target: BinaryIO) -> None:
        if not file.is_weights:
            _copy(source, target, take(file.size_bytes))
        elif file.name.endswith(".safetensors"):
            start = source.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            target.write(start)
            # A wrong length is for `Checkpoint.open` to name.
            if length <= min(_MAX_HEADER_BYTES, file.size_bytes):
                _copy(source, target, take(length))
        target.truncate(file.size_bytes)

    return _make(directory / _OUTLINES, checkpoint, copy)


def fetch_whole(url: str, key: str, prefixes: tuple[str, ...], directory: Path, max_bytes: int | None = None) -> Path:
    """Fetches a checkpoint, unless it is there already. Two fetches of one checkpoint take turns. `key` is that of the
    outline that was planned with; all fetched checkpoints may take `max_bytes`.
    """
    if (directory / key).is_dir():
        return directory / key
    checkpoint = list_checkpoint(url, prefixes)
    if checkpoint.key != key:
        raise ModelFetchFailed(url, "it has changed since the compile was accepted")
    make_private_directory(directory)

    @contextmanager
    def room() -> Iterator[None]:
        size_bytes = checkpoint.size_bytes
        with reserving(directory, key, size_bytes, url=url, max_bytes=max_bytes):
            if (free := shutil.disk_usage(directory).free) < size_bytes:
                raise ResourcesShort("disk space", f"{size_bytes} bytes to fetch, {free} free", _RETRY_AFTER_S)
            yield

    return _make(directory, checkpoint, lambda file, source, target: _copy(source, target, file.size_bytes), room)


def measure_fetched(directory: Path, key: str) -> int:
    """Bytes that a fetch has written so far; 0 if none runs."""
    try:
        return sum(file.stat().st_size for file in part_of(directory, key).rglob("*") if file.is_file())
    except OSError:
        return 0


def remove_unfinished(directory: Path) -> None:
    """Removes what killed fetches have left, but nothing of those that run."""
    for parent in (directory, directory / _OUTLINES):
        for part in parent.glob(".*.part"):
            try:
                with lock_of(part).acquire(timeout=0):
                    shutil.rmtree(part, ignore_errors=True)
            except (Timeout, OSError):
                continue


def _make(
    parent: Path,
    checkpoint: RemoteCheckpoint,
    copy: Callable[[RemoteFile, BinaryIO, BinaryIO], None],
    room: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Path:
    """Makes a directory of a checkpoint's files in another one, which then takes its name at once; `room` makes room
    for them, until the end of the context.
    """
    make_private_directory(parent)
    target, part = parent / checkpoint.key, part_of(parent, checkpoint.key)
    # The kernel unlocks the file of a process that dies.
    with naming_failures(checkpoint.url), lock_of(part):
        if target.is_dir():
            return target
        shutil.rmtree(part, ignore_errors=True)
        with room():
            part.mkdir(mode=0o700)
            try:
                for file in checkpoint.files.values():
                    (part / file.name).parent.mkdir(mode=0o700, exist_ok=True)
                    with checkpoint.open(file) as source, (part / file.name).open("xb") as written:
                        copy(file, source, written)
                        written.flush()
                        os.fsync(written.fileno())
                part.rename(target)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    return target


def _copy(source: BinaryIO, target: BinaryIO, size_bytes: int) -> None:
    """Copies exactly as many bytes as were listed."""
    left = size_bytes
    while left:
        data = source.read(min(left, _CHUNK_BYTES))
        if not data:
            raise OSError(f"the file ends {left} bytes early")
        target.write(data)
        left -= len(data)
