"""Runs each build in a process and process group of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Container
from pathlib import Path
from typing import Final, Protocol

import msgspec

from compiler_svc.builds.job import BuildJob, BuildResult, JobDirectory
from compiler_svc.errors import BuildFailed
from compiler_svc.lower.pool import LOWERING_ENVIRONMENT, make_forkserver
from compiler_svc.records import BuildNews, Progress
from edge.spans import record_span
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.threads import SHORT_SPIN_TURNS

#: Named, not imported: the module loads torch, which this process must not.
_BUILD_PROCESS: Final = "compiler_svc.builds.process"
#: No news of a build is longer.
_MAX_NEWS_SIZE_BYTES: Final = 1 << 16

#: The runner calls it with every progress of a build.
OnProgress = Callable[[Progress], Awaitable[None]]


class BuildRunner(Protocol):
    """Something that runs builds."""

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        """Runs one build; cancelling the call ends it.

        Raises:
            KilnError: The build failed with this error.
        """

    def discard(self, build_id: str) -> None:
        """Removes what attempts at a build have left. Has no effect while the build runs."""

    def retain(self, build_ids: Container[str]) -> None:
        """Removes what a former process left of all builds but these."""


class ProcessBuildRunner:
    """Runs each build in a process of its own, which it forks from one that has loaded torch."""

    def __init__(self, jobs: Path) -> None:
        """Takes the directory that holds the job directories."""
        jobs.mkdir(parents=True, exist_ok=True)
        self._jobs = jobs
        self._running: set[str] = set()
        # Builds and ranks compute side by side, so threads spin briefly unless the operator says otherwise.
        spinning = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(SHORT_SPIN_TURNS))}
        self._builds = Forkserver(
            "kiln-builds", Call(f"{_BUILD_PROCESS}:preload"), environment={**LOWERING_ENVIRONMENT, **spinning}
        )
        self._lowerings = make_forkserver(self._builds)

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        """Runs one build; cancelling the call kills its process group.

        Raises:
            BuildFailed: The process ended without a result.
            KilnError: The error that the process reported.
        """
        path = self._jobs / job.build_id
        directory = JobDirectory(path)
        self._running.add(job.build_id)
        try:
            directory.begin(job)
            return read_result(directory, await self._run_process(path, on_progress))
        finally:
            # Blocks instead of awaiting: a second cancellation must not interrupt it.
            directory.end()
            self._running.discard(job.build_id)

    async def _run_process(self, path: Path, on_progress: OnProgress) -> int | None:
        """Runs the job of a directory; returns the exit code as `ChildProcess` does."""
        progress, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        progress.setblocking(False)
        start_ns, start_s = time.time_ns(), time.perf_counter()
        with progress:
            with theirs:
                # First, because it may start the forkserver of builds.
                lowerings = self._lowerings.connect()
                fds = [end.fileno() for end in (theirs, self._builds.connect(), lowerings)]
                process = self._builds.start(Call(f"{_BUILD_PROCESS}:run_job", (str(path),)), fds, name="kiln-build")
            try:
                loop = asyncio.get_running_loop()
                while packet := await loop.sock_recv(progress, _MAX_NEWS_SIZE_BYTES):
                    news = msgspec.json.decode(packet, type=BuildNews)
                    if news.part is not None:
                        record_span(news.part.name, news.part.start_ns, news.part.duration_s)
                    if news.progress is not None:
                        await on_progress(news.progress)
                return await process.wait()
            finally:
                await asyncio.shield(process.end())
                if process.pid is not None:
                    record_span("build process", start_ns, time.perf_counter() - start_s, {"process.pid": process.pid})

    def discard(self, build_id: str) -> None:
        """Removes what attempts at a build have left. Has no effect while the build runs."""
        if build_id not in self._running:
            JobDirectory(self._jobs / build_id).remove()

    def retain(self, build_ids: Container[str]) -> None:
        """Removes what a former process left of all builds but these."""
        for path in self._jobs.iterdir():
            if path.name not in build_ids:
                JobDirectory(path).remove()


def read_result(directory: JobDirectory, exit_code: int | None) -> BuildResult:
    """Reads the outcome that an ended build process left in its job directory.

    Args:
        exit_code: Exit code of the process; None if it ended together with its forkserver.

    Raises:
        BuildFailed: The process left no outcome.
        KilnError: The error that the process reported.
    """
    outcome = directory.read_outcome()
    if outcome is None:
        if exit_code is None:
            how = "with the process that it was forked from"
        elif exit_code < 0:
            how = f"killed by {signal.Signals(-exit_code).name}"
        else:
            how = f"exit code {exit_code}"
        raise BuildFailed(f"its process ended without a result ({how})")
    if outcome.error is not None:
        raise outcome.error.to_error()
    assert outcome.result is not None, "an outcome is a result or an error"
    return outcome.result
