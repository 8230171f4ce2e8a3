"""Running a build in a process of its own, with a process group of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Container
from pathlib import Path
from typing import Final, Protocol

import msgspec

from compiler_svc.builds.job import BuildJob, BuildResult, JobDirectory
from compiler_svc.errors import BuildFailed
from compiler_svc.nurseries.nursery import StartedNursery
from compiler_svc.records import Progress

#: Not imported here: it loads what this process must not.
NURSERY_MODULE: Final = "compiler_svc.builds.nursery_process"

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
    """Runs each build in a process of its own, forked from one that has loaded what builds need."""

    def __init__(self, jobs: Path) -> None:
        """Takes the directory of job directories."""
        jobs.mkdir(parents=True, exist_ok=True)
        self._jobs = jobs
        self._running: set[str] = set()
        self._nursery = StartedNursery(NURSERY_MODULE)

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
            process = self._nursery.start(os.fsencode(path))
            try:
                async for packet in process.follow():
                    await on_progress(msgspec.json.decode(packet, type=Progress))
            finally:
                await asyncio.shield(process.end())
            return read_result(directory, process.return_code)
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


def read_result(directory: JobDirectory, return_code: int | None) -> BuildResult:
    """Reads what a process has left that ended with an exit code, or None where its nursery died with it.

    Raises:
        BuildFailed: It left nothing.
        KilnError: What it reported.
    """
    outcome = directory.read_outcome()
    if outcome is None:
        if return_code is None:
            how = "with the process that it was forked from"
        elif return_code < 0:
            how = f"killed by {signal.Signals(-return_code).name}"
        else:
            how = f"exit code {return_code}"
        raise BuildFailed(f"its process ended without a result ({how})")
    if outcome.error is not None:
        raise outcome.error.to_error()
    assert outcome.result is not None, "an outcome is a result or an error"
    return outcome.result
