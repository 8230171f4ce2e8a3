"""What counts as a shortage of the host, and what repeats after one."""

from __future__ import annotations

import errno
import os
import sqlite3

import pytest

from bundle.errors import ResourcesShort
from bundle.host.shortage import find_shortage, lasting_delays, name_shortage, naming_shortages, outlast_shortages


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/a/path/of/the/host")


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (os_error(errno.EMFILE), "descriptors of this process"),
        (os_error(errno.ENOSPC), "disk space"),
        (os_error(errno.ENOMEM), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "processes and threads"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_shortages_are_named_without_paths(error: Exception, resource: str) -> None:
    with pytest.raises(ResourcesShort, match=f"short of {resource}") as caught, naming_shortages():
        raise error
    assert caught.value.metadata["resource"] == resource
    assert "/a/path" not in str(caught.value)


@pytest.mark.parametrize("error", [os_error(errno.ENOENT), RuntimeError("another"), ValueError(), sqlite3.Error()])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_shortages():
        raise error
    assert caught.value is error


def test_again_is_a_shortage_where_a_process_starts_and_nowhere_else() -> None:
    error = os_error(errno.EAGAIN)
    assert name_shortage(error) is None
    found = name_shortage(error, of_start=True)
    assert found is not None
    assert found.metadata["resource"] == "processes and threads"


@pytest.mark.parametrize(
    "message",
    [
        "DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)",
        "Error while mapping: Cannot allocate memory (os error 12)",
        "library.so: failed to map segment from shared object: Cannot allocate memory",
    ],
)
def test_libraries_quote_the_operating_system(message: str) -> None:
    found = find_shortage(RuntimeError(message))
    assert found is not None
    assert found.metadata == {"resource": "memory", "detail": "Cannot allocate memory"}
    assert find_shortage(RuntimeError("expected 4 tensors")) is None


async def test_attempts_are_repeated_until_the_delays_end() -> None:
    tries: list[ResourcesShort] = []

    async def fail() -> None:
        raise os_error(errno.EMFILE)

    with pytest.raises(ResourcesShort):
        await outlast_shortages(fail, (0.0, 0.0), on_shortage=tries.append)
    assert len(tries) == 2
    delays_s = lasting_delays()
    for most_s in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        assert 0.75 * most_s <= next(delays_s) <= most_s
