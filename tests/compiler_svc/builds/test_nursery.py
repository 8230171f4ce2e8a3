"""The nursery of builds at its edges: before it has loaded, when it dies, when a build cannot even begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from compiler_svc.builds.job import JobDirectory
from compiler_svc.builds.nursery import BuildNursery, BuildProcess
from compiler_svc.builds.runner import read_result
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress


def find_nursery() -> psutil.Process:
    children = psutil.Process().children()
    (nursery,) = [child for child in children if "compiler_svc.builds.nursery_process" in child.cmdline()]
    return nursery


async def follow(process: BuildProcess) -> list[Progress]:
    return [progress async for progress in process.follow()]


async def test_builds_that_come_to_nothing(tmp_path: Path) -> None:
    nursery = BuildNursery()

    # Given up while the nursery loads: there is nothing to wait for.
    given_up = nursery.start(tmp_path / "none")
    async with asyncio.timeout(1):
        await given_up.end()
    assert given_up.return_code is None

    # The nursery dies: its builds end by name.
    orphan = nursery.start(tmp_path / "none")
    killed = find_nursery()
    killed.kill()
    assert await follow(orphan) == []
    await orphan.end()
    # What is asked of it while it dies would end likewise.
    killed.wait(10)
    with pytest.raises(BuildFailed, match="without a result \\(with the process that it was forked from\\)"):
        read_result(JobDirectory(tmp_path / "none"), orphan.return_code)

    # Another one takes its place. The directory of a job that is not there ends the build, and not the nursery.
    for _ in range(2):
        broken = nursery.start(tmp_path / "none")
        assert await follow(broken) == []
        await broken.end()
        assert broken.return_code == 1
        with pytest.raises(BuildFailed, match=r"without a result \(exit code 1\)"):
            read_result(JobDirectory(tmp_path / "none"), broken.return_code)
    find_nursery().kill()
