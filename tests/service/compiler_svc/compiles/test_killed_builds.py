"""How long what a build has finished stays, by how its process ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bundle.errors import KilnError
from compiler_svc.builds.job import NO_ROOM_EXIT_CODE, BuildEnvironment, BuildJob, BuildOutcome, JobDirectory
from compiler_svc.compiles.build_runner import ProcessBuildRunner
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress
from execution.failure import Failure
from tests.hang_guard import HANG_S
from tests.unit.compiler_svc.test_spec import SPEC

ENVIRONMENT = BuildEnvironment(
    store=Path("/store"),
    database_url="sqlite://",
    lowering_cache=Path("/cache"),
    num_lowerings=1,
    lowering_timeout_s=1,
    lowering_memory_bytes=1,
)
JOB = BuildJob(build_id="build", spec=SPEC, checkpoint_digest="sha256:0", environment=ENVIRONMENT)
REFUSED = BuildOutcome(error=Failure.of(BuildFailed("it fell")))

#: What a build process leaves before it ends, and its exit code.
End = Callable[[JobDirectory], int | None]


class EndingRunner(ProcessBuildRunner):
    """Its builds finish a shard, and end as the test says."""

    end: End

    async def _run_process(self, path: Path, on_progress: object) -> int | None:
        directory = JobDirectory(path)
        (directory.sharded / "rank0.json").touch()
        return self.end(directory)


async def run(runner: EndingRunner, end: End, job: BuildJob = JOB) -> None:
    async def ignore(_progress: Progress) -> None: ...

    runner.end = end
    with pytest.raises(KilnError):
        await runner.run(job, ignore)
    runner.discard(job.build_id)


def list_left(jobs: Path) -> list[Path]:
    return list(jobs.iterdir())


def refuse(directory: JobDirectory) -> int:
    directory.write_outcome(REFUSED)
    return 0


def die(_directory: JobDirectory) -> int:
    return -signal.SIGKILL


def die_late(directory: JobDirectory) -> int:
    refuse(directory)
    return die(directory)


@pytest.mark.parametrize("end", [die, lambda _directory: None], ids=["killed", "with its forkserver"])
async def test_what_a_killed_build_has_finished_waits_for_an_equal_one(tmp_path: Path, end: End) -> None:
    runner = EndingRunner(tmp_path)
    await run(runner, end)
    assert (tmp_path / "build" / "sharded" / "rank0.json").exists()
    runner.discard("build")
    assert (tmp_path / "build").exists(), "other compiles that waited for it discard it, too"
    await run(runner, refuse)
    assert list_left(tmp_path) == []


@pytest.mark.parametrize(
    "end",
    [refuse, die_late, lambda _directory: NO_ROOM_EXIT_CODE, lambda _directory: os.EX_SOFTWARE],
    ids=["an outcome", "killed behind its outcome", "no room", "an exit code"],
)
async def test_what_a_failed_build_has_finished_goes(tmp_path: Path, end: End) -> None:
    await run(EndingRunner(tmp_path), end)
    assert list_left(tmp_path) == []


@pytest.mark.parametrize(
    "job",
    [
        msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, skip_cache_lookup=True)),
        msgspec.structs.replace(JOB, graphs_of="sha256:0"),
    ],
    ids=["without the cache", "graphs alone"],
)
async def test_what_no_other_build_could_use_goes(tmp_path: Path, job: BuildJob) -> None:
    await run(EndingRunner(tmp_path), die, job)
    assert list_left(tmp_path) == []


async def test_what_nobody_asks_for_goes_after_a_while(tmp_path: Path) -> None:
    runner = EndingRunner(tmp_path, keep_killed_s=0.01)
    await run(runner, die)
    async with asyncio.timeout(HANG_S):
        while list_left(tmp_path):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(0.005)
    # Again, as if nothing had been.
    await run(runner, die)
    assert (tmp_path / "build").exists()
