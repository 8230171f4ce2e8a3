"""How long what a build has finished stays, by how its process ended."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bundle.errors import KilnError
from compiler_svc.builds.job import BuildEnvironment, BuildJob
from compiler_svc.compiles.build_runner import BuildRunner
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress
from execution.failure import Failure
from execution.forkserver.task import Ending, encode
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
REFUSED = Ending(0, encode(Failure.of(BuildFailed("it fell"))), is_failure=True)
KILLED = Ending(-signal.SIGKILL)


class EndingRunner(BuildRunner):
    """Its builds finish a shard, and end as the test says."""

    end: Ending

    async def _run_process(self, path: Path, _order: bytes, _on_progress: object) -> Ending:
        (path / "sharded" / "rank0.json").touch()
        return self.end


async def run(runner: EndingRunner, end: Ending, job: BuildJob = JOB) -> None:
    async def ignore(_progress: Progress) -> None: ...

    runner.end = end
    with pytest.raises(KilnError):
        await runner.run(job, ignore)
    runner.discard(job.build_id)


def list_left(jobs: Path) -> list[Path]:
    return list(jobs.iterdir())


@pytest.mark.parametrize("end", [KILLED, Ending(None)], ids=["killed", "with its forkserver"])
async def test_what_a_killed_build_has_finished_waits_for_an_equal_one(tmp_path: Path, end: Ending) -> None:
    runner = EndingRunner(tmp_path)
    await run(runner, end)
    assert (tmp_path / "build" / "sharded" / "rank0.json").exists()
    runner.discard("build")
    assert (tmp_path / "build").exists(), "other compiles that waited for it discard it, too"
    await run(runner, REFUSED)
    assert list_left(tmp_path) == []


@pytest.mark.parametrize(
    "end",
    [REFUSED, replace(REFUSED, exit_code=KILLED.exit_code), Ending(1)],
    ids=["an answer", "killed behind its answer", "an exit code"],
)
async def test_what_a_failed_build_has_finished_goes(tmp_path: Path, end: Ending) -> None:
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
    await run(EndingRunner(tmp_path), KILLED, job)
    assert list_left(tmp_path) == []


async def test_what_nobody_asks_for_goes_after_a_while(tmp_path: Path) -> None:
    runner = EndingRunner(tmp_path, keep_killed_s=0.01)
    await run(runner, KILLED)
    async with asyncio.timeout(HANG_S):
        while list_left(tmp_path):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(0.005)
    # Again, as if nothing had been.
    await run(runner, KILLED)
    assert (tmp_path / "build").exists()
