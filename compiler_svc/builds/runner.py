"""Running a build in a process of its own, with a process group of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from compiler_svc.builds.job import BuildJob, BuildResult, JobDirectory
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Progress
from execution.parent_death import parent_environment

#: Called with every progress of a build.
OnProgress = Callable[[Progress], Awaitable[None]]


class BuildRunner(Protocol):
    """Runs builds."""

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        """Runs one build; cancelling the call ends it.

        Raises:
            KilnError: What went wrong.
        """

    def discard(self, build_id: str) -> None:
        """Forgets what attempts at a build have left; one that runs keeps it."""

    def retain(self, build_ids: Container[str]) -> None:
        """Forgets what a former process left of builds other than these."""


class ProcessBuildRunner:
    """Runs each build as `python -m compiler_svc.builds.process`."""

    def __init__(self, jobs: Path) -> None:
        """Takes the directory of job directories."""
        jobs.mkdir(parents=True, exist_ok=True)
        self._jobs = jobs
        self._running: set[str] = set()

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        """Runs one build; cancelling the call kills its process group.

        Raises:
            BuildFailed: The process ended without a result.
            KilnError: What the process reported.
        """
        path = self._jobs / job.build_id
        directory = JobDirectory(path)
        self._running.add(job.build_id)
        try:
            directory.begin(job)
            return_code = await _run_process(path, on_progress)
            return _read_result(directory, return_code)
        finally:
            # Not awaited: a cancelled call must not be cancelled again half-way through.
            directory.end()
            self._running.discard(job.build_id)

    def discard(self, build_id: str) -> None:
        """Forgets what attempts at a build have left; one that runs keeps it."""
        if build_id not in self._running:
            JobDirectory(self._jobs / build_id).remove()

    def retain(self, build_ids: Container[str]) -> None:
        """Forgets what a former process left of builds other than these."""
        for path in self._jobs.iterdir():
            if path.name not in build_ids:
                JobDirectory(path).remove()


async def _run_process(path: Path, on_progress: OnProgress) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "compiler_svc.builds.process",
        str(path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **parent_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            await on_progress(msgspec.json.decode(line, type=Progress))
        return await process.wait()
    finally:
        # The group outlives its leader where a compiler is still at work.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


def _read_result(directory: JobDirectory, return_code: int) -> BuildResult:
    outcome = directory.read_outcome()
    if outcome is None:
        how = f"killed by {signal.Signals(-return_code).name}" if return_code < 0 else f"exit code {return_code}"
        raise BuildFailed(f"its process ended without a result ({how})")
    if outcome.error is not None:
        raise outcome.error.to_error()
    assert outcome.result is not None, "an outcome is a result or an error"
    return outcome.result
