"""Builds that fail early: before their forkserver has loaded, when it dies, when a build cannot begin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bundle.errors import ResourcesShort
from compiler_svc.compiles.build_runner import BuildRunner, read_result
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress
from execution.forkserver.task import Ending
from tests.hang_guard import HANG_S
from tests.processes import lives, name_of, note_others, own_children
from tests.shortages import few_descriptors

#: How a build without a directory ends.
NOTHING = Ending(1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildRunner]:
    """One for all tests, because its forkserver takes seconds to load."""
    note_others()
    runner = BuildRunner(tmp_path_factory.mktemp("builds") / "jobs")
    yield runner
    runner._builds.close()
    runner._builds.close()
    _, alive = psutil.wait_procs(own_children(), timeout=HANG_S)
    assert alive == []


async def find_forkserver() -> psutil.Process:
    async with asyncio.timeout(HANG_S):
        while not (found := [one for one in own_children() if name_of(one) == "kiln-builds" and lives(one)]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


def begin(runner: BuildRunner, path: Path) -> asyncio.Task[Ending]:
    """Runs the job of a directory that is not there."""

    async def refuse(progress: Progress) -> None:
        raise AssertionError(f"a build without a job says {progress}")

    return asyncio.create_task(runner._run_process(path, b"", refuse))


async def test_builds_that_come_to_nothing(runner: BuildRunner, tmp_path: Path) -> None:
    path = tmp_path / "none"

    # The caller gives up while the forkserver loads: there is nothing to wait for.
    given_up = begin(runner, path)
    await asyncio.sleep(0.05)
    given_up.cancel()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(asyncio.CancelledError):
            await given_up

    # The forkserver dies: what is asked of it ends by name.
    orphan = begin(runner, path)
    killed = await find_forkserver()
    killed.kill()
    with pytest.raises(BuildFailed, match="without a result \\(with the process that it was forked from\\)"):
        read_result(await orphan)

    # Another one takes its place. The directory that is not there ends the build, and not the forkserver.
    for _ in range(2):
        with pytest.raises(BuildFailed, match=r"without a result \(exit code 1\)"):
            read_result(await begin(runner, path))
    assert await find_forkserver() != killed


@pytest.mark.parametrize("is_forkserver", [False, True])
async def test_a_build_without_descriptors_begins_when_there_are_some(
    runner: BuildRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_forkserver: bool
) -> None:
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.3,) * 100)
    # Without a job, it ends as soon as it has begun.
    assert await begin(runner, tmp_path / "none") == NOTHING
    pid = (await find_forkserver()).pid if is_forkserver else None
    # The service lacks them for its sockets, or the forkserver for what the request brings.
    with few_descriptors(1, pid):
        build = begin(runner, tmp_path / "none")
        await asyncio.sleep(0.1)
        assert not build.done()
    assert await build == NOTHING
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.3, 0.3))
    with few_descriptors(1, pid), pytest.raises(ResourcesShort, match="descriptors of this process"):
        await begin(runner, tmp_path / "none")
    assert await begin(runner, tmp_path / "none") == NOTHING
