"""Runs each build in a process and process group of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

# What a build raises becomes an error of its class here, if this process knows the class.
import compiler_svc.golden.errors  # noqa: F401
import execution.device_errors  # noqa: F401
from bundle.errors import ResourcesShort
from bundle.host.confinement import BUILD
from bundle.host.shortage import outlast_shortages
from compiler_svc.builds.job import BuildJob, JobAnswer, JobDirectory, JobResult
from compiler_svc.errors import BuildFailed, BuildStalled
from compiler_svc.lower.pool import LOWERING_ENVIRONMENT, make_forkserver
from compiler_svc.records import BuildNews, Progress, Stage
from edge.spans import record_span
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.forkserver.task import Ending, decode, encode, run_task
from execution.stall import LOOKS_PER_TIMEOUT, Stall, Watch
from execution.threads import SHORT_SPIN_TURNS

#: Named, not imported: the module loads torch, which this process must not.
_BUILD_PROCESS: Final = "compiler_svc.builds.process"

#: Seconds for which what a killed build had finished waits for an equal build.
KEEP_KILLED_S: Final = 3600.0

#: Seconds that a build may stand still, if no option says otherwise.
BUILD_IDLE_TIMEOUT_S: Final = 120.0

#: The runner calls it with every progress of a build.
OnProgress = Callable[[Progress], Awaitable[None]]


class BuildRunner:
    """Runs each build in a process of its own, which it forks from one that has loaded torch."""

    def __init__(
        self, jobs: Path, *, idle_timeout_s: float = BUILD_IDLE_TIMEOUT_S, keep_killed_s: float = KEEP_KILLED_S
    ) -> None:
        """Starts nothing yet. A build, or a forkserver that owes an answer, may go `idle_timeout_s` without computing.
        What a killed build had finished waits `keep_killed_s` for an equal build.
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

    async def run(self, job: BuildJob, on_progress: OnProgress) -> JobResult:
        """Runs one build; cancelling the call kills its process group."""
        path = self._jobs / job.build_id
        directory, stage = JobDirectory(path), Stage.TRACE

        async def follow(progress: Progress) -> None:
            nonlocal stage
            stage = progress.stage
            await on_progress(progress)

        self._running.add(job.build_id)
        self._forget_killed(job.build_id)
        try:
            directory.begin()
            ending = await self._run_process(path, encode(job), follow)
            if ending.answer is not None:
                # Not left to the build: one whose compiler died would do it, too, and the next one goes on behind it.
                await asyncio.to_thread(directory.free)
            # No other build has the id of one that may not use the cache, and graphs alone leave nothing to go on with.
            is_repeatable = not job.spec.skip_cache_lookup and job.graphs_of is None
            if is_repeatable and ending.was_cut_short:
                self._killed[job.build_id] = None
            return read_result(ending, stage)
        finally:
            # Blocks instead of awaiting: a second cancellation must not interrupt it.
            directory.end()
            self._running.discard(job.build_id)

    async def _run_process(self, path: Path, order: bytes, on_progress: OnProgress) -> Ending:
        process: ChildProcess | None = None

        async def pass_on(packet: bytes) -> None:
            news = msgspec.json.decode(packet, type=BuildNews)
            if news.part is not None:
                record_span(news.part.name, news.part.start_ns, news.part.duration_s)
            if news.progress is not None:
                await on_progress(news.progress)

        @asynccontextmanager
        async def watching(started: ChildProcess) -> AsyncIterator[None]:
            nonlocal process
            process = started
            start_ns, start_s = time.time_ns(), time.perf_counter()
            watch = BuildWatch(started, self._idle_timeout_s)
            try:
                yield
                if watch.has_killed:
                    raise BuildStalled(self._idle_timeout_s)
            finally:
                watch.stop()
                if started.pid is not None:
                    record_span("build process", start_ns, time.perf_counter() - start_s, {"process.pid": started.pid})

        async def attempt() -> Ending:
            # First, because it may start the forkserver of builds.
            lowerings = self._lowerings.connect()
            fds = [end.fileno() for end in (self._builds.connect(), lowerings)]
            call = Call(f"{_BUILD_PROCESS}:run_job", (str(path),))
            return await run_task(
                self._builds,
                call,
                order,
                fds,
                name="kiln-build",
                confinement=BUILD,
                watching=watching,
                on_news=pass_on,
            )

        def check_repeatable(shortage: ResourcesShort) -> None:
            # A build that has begun may have worked for long. Its client decides whether it begins again.
            if process is not None and process.pid is not None:
                raise shortage

        return await outlast_shortages(attempt, on_shortage=check_repeatable)

    def discard(self, build_id: str) -> None:
        """Removes what attempts at a build have left. Has no effect while the build runs. If the build was killed, what
        it had finished may wait for an equal build, for `keep_killed_s`.
        """
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
    """Kills a build process that computes nothing, because it is stopped or waits for what never comes. The process of
    a build that waits for lowerings or ranks computes: it watches them.
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


def read_result(ending: Ending, stage: Stage = Stage.TRACE) -> JobResult:
    """Reads the result that a build process has left, which it was last heard of in a stage."""
    if (answer := ending.result()) is None:
        raise BuildFailed(f"its process ended in the stage {stage} without a result ({ending})")
    return decode(answer, JobAnswer).result
