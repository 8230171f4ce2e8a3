"""A nursery at its edges: before it has loaded, when it dies, when a process cannot even begin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compiler_svc.builds.job import JobDirectory
from compiler_svc.compiles.build_runner import NURSERY_MODULE, read_result
from compiler_svc.errors import BuildFailed
from compiler_svc.nurseries.nursery import ForkedProcess, StartedNursery


@pytest.fixture
def nursery() -> Iterator[StartedNursery]:
    nursery = StartedNursery(NURSERY_MODULE)
    yield nursery
    nursery.close()
    nursery.close()


def find_process() -> psutil.Process:
    (process,) = [child for child in psutil.Process().children() if NURSERY_MODULE in child.cmdline()]
    return process


async def follow(process: ForkedProcess) -> list[bytes]:
    return [packet async for packet in process.follow()]


async def test_builds_that_come_to_nothing(nursery: StartedNursery, tmp_path: Path) -> None:
    request = os.fsencode(tmp_path / "none")

    # Given up while the nursery loads: there is nothing to wait for.
    given_up = nursery.start(request)
    async with asyncio.timeout(1):
        await given_up.end()
    assert given_up.return_code is None

    # The nursery dies: what is asked of it ends by name.
    orphan = nursery.start(request)
    killed = find_process()
    killed.kill()
    assert await follow(orphan) == []
    await orphan.end()
    # What is asked of it while it dies would end likewise.
    killed.wait(10)
    with pytest.raises(BuildFailed, match="without a result \\(with the process that it was forked from\\)"):
        read_result(JobDirectory(tmp_path / "none"), orphan.return_code)

    # Another one takes its place. The directory of a job that is not there ends the build, and not the nursery.
    for _ in range(2):
        broken = nursery.start(request)
        assert await follow(broken) == []
        await broken.end()
        assert broken.return_code == 1
        with pytest.raises(BuildFailed, match=r"without a result \(exit code 1\)"):
            read_result(JobDirectory(tmp_path / "none"), broken.return_code)


async def test_closing_ends_it(nursery: StartedNursery, tmp_path: Path) -> None:
    broken = nursery.start(os.fsencode(tmp_path / "none"))
    await follow(broken)
    process = find_process()
    nursery.close()
    assert not process.is_running()
    await broken.end()
