"""Runs each build in a process and process group of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Container
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

import msgspec

from bundle.confinement import BUILD
from bundle.errors import ResourcesShort
from bundle.shortage import RETRY_AFTER_S, outlast_shortages
from compiler_svc.builds.job import NO_ROOM_EXIT_CODE, BuildJob, BuildResult, JobDirectory
from compiler_svc.errors import BuildFailed, BuildStalled
from compiler_svc.lower.pool import LOWERING_ENVIRONMENT, make_forkserver
from compiler_svc.records import BuildNews, Progress
from edge.spans import record_span
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.stall import LOOKS_PER_TIMEOUT, Stall, Watch
from execution.threads import SHORT_SPIN_TURNS

#: Named, not imported: the module loads torch, which this process must not.
_BUILD_PROCESS: Final = "compiler_svc.builds.process"
#: No news of a build is longer.
_MAX_NEWS_SIZE_BYTES: Final = 1 << 16

#: Seconds for which what a killed build had finished waits for an equal build.
KEEP_KILLED_S: Final = 3600.0

#: Seconds that a build may stand still, if no option says otherwise.
BUILD_IDLE_TIMEOUT_S: Final = 120.0

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
        """Removes what attempts at a build have left. Has no effect while the build runs.

        If the build was killed, what it had finished may wait for an equal build, for a bounded time.
        """

    def retain(self, build_ids: Container[str]) -> None:
        """Removes what a former process left of all builds but these."""


class ProcessBuildRunner:
    """Runs each build in a process of its own, which it forks from one that has loaded torch."""

    def __init__(
        self, jobs: Path, *, idle_timeout_s: float = BUILD_IDLE_TIMEOUT_S, keep_killed_s: float = KEEP_KILLED_S
    ) -> None:
        """Starts nothing yet.

        Args:
            jobs: Directory that holds the job directories.
            idle_timeout_s: Seconds that a build, or a forkserver that owes an answer, may go without computing.
            keep_killed_s: Seconds for which what a killed build had finished waits for an equal build.
        """
        jobs.mkdir(parents=True, exist_ok=True)
        self._jobs = jobs
        self._running: set[str] = set()
        # Builds that were killed, and when what they had finished is removed; None until they are discarded.
        self._killed: dict[str, asyncio.TimerHandle | None] = {}
        self._keep_killed_s = keep_killed_s
        self._idle_timeout_s = idle_timeout_s
        # Builds and ranks compute side by side, so threads spin briefly unless the operator says otherwise.
        spinning = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(SHORT_SPIN_TURNS))}
        self._builds = Forkserver(
            "kiln-builds",
            Call(f"{_BUILD_PROCESS}:preload"),
            kind="build",
            environment={**LOWERING_ENVIRONMENT, **spinning},
            patience_s=idle_timeout_s,
        )
        self._lowerings = make_forkserver(self._builds, patience_s=idle_timeout_s)

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        """Runs one build; cancelling the call kills its process group.

        Raises:
            BuildFailed: The process ended without a result.
            BuildStalled: The process stood still for too long.
            ResourcesShort: The host has no room for the process, or the process found none for its outcome.
            KilnError: The error that the process reported.
        """
        path = self._jobs / job.build_id
        directory = JobDirectory(path)
        self._running.add(job.build_id)
        self._forget_killed(job.build_id)
        try:
            directory.begin(job)
            exit_code = await self._run_process(path, on_progress)
            # No other build has the id of one that may not use the cache, and graphs alone leave nothing to go on with.
            is_repeatable = not job.spec.skip_cache_lookup and job.graphs_of is None
            if is_repeatable and was_killed(directory, exit_code):
                self._killed[job.build_id] = None
            return read_result(directory, exit_code)
        finally:
            # Blocks instead of awaiting: a second cancellation must not interrupt it.
            directory.end()
            self._running.discard(job.build_id)

    async def _run_process(self, path: Path, on_progress: OnProgress) -> int | None:
        """Runs the job of a directory; returns the exit code as `ChildProcess` does.

        Raises:
            BuildStalled: The process stood still for too long.
            ResourcesShort: The host has no room for the process, or a process that runs has met a shortage.
        """
        process: ChildProcess | None = None

        async def attempt() -> int | None:
            nonlocal process
            progress, process = await self._start(path)
            return await self._follow(process, progress, on_progress)

        def check_repeatable(shortage: ResourcesShort) -> None:
            # A build that has begun may have worked for long. Its client decides whether it begins again.
            if process is not None and process.pid is not None:
                raise shortage

        return await outlast_shortages(attempt, on_shortage=check_repeatable)

    async def _follow(self, process: ChildProcess, progress: socket.socket, on_progress: OnProgress) -> int | None:
        """Passes a process's news on until it has ended; returns its exit code."""
        start_ns, start_s = time.time_ns(), time.perf_counter()
        with progress:
            watch = BuildWatch(process, self._idle_timeout_s)
            try:
                loop = asyncio.get_running_loop()
                while packet := await loop.sock_recv(progress, _MAX_NEWS_SIZE_BYTES):
                    news = msgspec.json.decode(packet, type=BuildNews)
                    if news.part is not None:
                        record_span(news.part.name, news.part.start_ns, news.part.duration_s)
                    if news.progress is not None:
                        await on_progress(news.progress)
                exit_code = await process.wait()
                if watch.has_killed:
                    raise BuildStalled(self._idle_timeout_s)
                return exit_code
            finally:
                watch.stop()
                await asyncio.shield(process.end())
                if process.pid is not None:
                    record_span("build process", start_ns, time.perf_counter() - start_s, {"process.pid": process.pid})

    async def _start(self, path: Path) -> tuple[socket.socket, ChildProcess]:
        """Requests the process of a job; returns the socket of its news, and the process.

        Raises:
            ResourcesShort, OSError: The host has no room for the process or its socket.
        """
        progress, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as unused, theirs:
            unused.enter_context(progress)
            progress.setblocking(False)
            # First, because it may start the forkserver of builds.
            lowerings = self._lowerings.connect()
            fds = [end.fileno() for end in (theirs, self._builds.connect(), lowerings)]
            process = self._builds.start(
                Call(f"{_BUILD_PROCESS}:run_job", (str(path),)), fds, name="kiln-build", confinement=BUILD
            )
            unused.pop_all()
        return progress, process

    def discard(self, build_id: str) -> None:
        """Removes what attempts at a build have left; see `BuildRunner.discard`."""
        if build_id in self._running:
            return
        if build_id not in self._killed:
            self._remove(build_id)
        elif self._killed[build_id] is None:
            loop = asyncio.get_running_loop()
            self._killed[build_id] = loop.call_later(self._keep_killed_s, self._remove, build_id)

    def _remove(self, build_id: str) -> None:
        self._forget_killed(build_id)
        JobDirectory(self._jobs / build_id).remove()

    def _forget_killed(self, build_id: str) -> None:
        if (timer := self._killed.pop(build_id, None)) is not None:
            timer.cancel()

    def retain(self, build_ids: Container[str]) -> None:
        """Removes what a former process left of all builds but these."""
        for path in self._jobs.iterdir():
            if path.name not in build_ids:
                JobDirectory(path).remove()


class BuildWatch:
    """Kills a build process that computes nothing, because it is stopped or waits for what never comes.

    The process of a build that waits for lowerings or ranks computes: it watches them.

    Attributes:
        has_killed: Whether it has killed the process.
    """

    def __init__(self, process: ChildProcess, idle_timeout_s: float) -> None:
        """Begins to look at the process, from the running event loop."""
        self.has_killed = False
        self._process = process
        self._idle_timeout_s = idle_timeout_s
        interval_s = idle_timeout_s / LOOKS_PER_TIMEOUT
        self._stall = Stall(interval_s)
        self._watch = Watch(interval_s, self._look)

    def stop(self) -> None:
        """Looks no more."""
        self._watch.stop()

    def _look(self) -> None:
        pid = self._process.pid
        # The forkserver's watch looks after a process that has not been forked yet.
        self._stall.look(pid, [] if pid is None else [pid])
        if self._stall.still_s >= self._idle_timeout_s:
            self.stop()
            self.has_killed = True
            self._process.kill()


def was_killed(directory: JobDirectory, exit_code: int | None) -> bool:
    """Whether a build process ended by a signal, or with its forkserver, before it had an outcome."""
    return (exit_code is None or exit_code < 0) and directory.read_outcome() is None


def read_result(directory: JobDirectory, exit_code: int | None) -> BuildResult:
    """Reads the outcome that an ended build process left in its job directory.

    Args:
        exit_code: Exit code of the process; None if it ended together with its forkserver.

    Raises:
        BuildFailed: The process left no outcome.
        ResourcesShort: The process found no room for one.
        KilnError: The error that the process reported.
    """
    outcome = directory.read_outcome()
    if outcome is None:
        if exit_code == NO_ROOM_EXIT_CODE:
            raise ResourcesShort("disk space", "the build found no room for its outcome", RETRY_AFTER_S)
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
