"""Fetches the checkpoint of an accepted compile whose client named it by a URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from compiler_svc.planning.errors import PlanFailed, PlanMemoryExceeded, PlanTimedOut
from compiler_svc.planning.job_spec import JobSpec
from compiler_svc.planning.pool import PlanningLimits, PlanningPool
from compiler_svc.remote.errors import ModelFetchFailed, OutlineMissing
from compiler_svc.remote.fetching import fetch_outline, fetch_whole, measure_fetched, remove_unfinished
from compiler_svc.remote.room import using
from compiler_svc.remote.urls import UrlSettings, check_url

_MAX_FETCHES: Final = 2
#: As many compiles as are accepted may wait: the queue bounds them.
_MAX_WAITING: Final = 1 << 16
_MAX_MEMORY_BYTES: Final = 1 << 30
_REPORT_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is; `total_bytes` is 0 if unknown."""

    url: str
    fetched_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        share = f" ({self.fetched_bytes * 100 // self.total_bytes} %)" if self.total_bytes else ""
        return f"fetching {self.url}: {self.fetched_bytes} of {self.total_bytes} bytes{share}"


T = TypeVar("T")


class CheckpointFetcher:
    """Fetches checkpoints in processes that can be killed, a few at once."""

    def __init__(self, fetches: PlanningPool, urls: UrlSettings, timeout_s: float) -> None:
        """Removes what fetches of a killed process have left. `fetches` runs fetches of outlines, and has the
        forkserver of all; `timeout_s` is the time of one fetch.
        """
        limits = PlanningLimits(
            max_running=_MAX_FETCHES,
            max_waiting=_MAX_WAITING,
            timeout_s=timeout_s,
            max_memory_bytes=_MAX_MEMORY_BYTES,
        )
        self._outlines = fetches
        self._pool = fetches.with_limits(limits)
        self._urls = urls
        if urls.directory is not None:
            remove_unfinished(urls.directory)

    async def plan(self, planning: PlanningPool, work: Callable[..., T]) -> T:
        """Does planning work with `urls`, and fetches the outline of each URL for which it raises OutlineMissing."""
        urls = self._urls
        while True:
            try:
                return await planning.run(partial(work, urls=urls))
            except OutlineMissing as missing:
                url = check_url(missing.url, urls.prefixes)
                assert urls.directory is not None, "prefixes come with a directory"
                try:
                    outline = await self._outlines.run(partial(fetch_outline, url, urls.prefixes, urls.directory))
                finally:
                    await asyncio.to_thread(remove_unfinished, urls.directory)
                urls = replace(urls, outlines={**urls.outlines, url: outline})

    @asynccontextmanager
    async def keeping(self, spec: JobSpec) -> AsyncIterator[None]:
        """Keeps the checkpoint of a job from removal, if it is one of a URL: from before its fetch to the end."""
        if not spec.url or self._urls.directory is None:
            yield
            return
        async with using(self._urls.directory, spec.model.name):
            yield

    async def fetch(self, spec: JobSpec, report: Callable[[FetchProgress], Awaitable[None]]) -> JobSpec:
        """Fetches the checkpoint of a job, unless it is there already; cancelling the call ends the fetch.

        The job's `model` is the outline, and the caller is `keeping` it. Calls `report` about once a second.
        """
        url, directory = check_url(spec.url, self._urls.prefixes), self._urls.directory
        assert directory is not None, "prefixes come with a directory"
        total_bytes = _measure(spec.model)
        work = partial(fetch_whole, url, spec.model.name, self._urls.prefixes, directory, self._urls.max_bytes)
        task = asyncio.create_task(self._pool.run(work))
        try:
            while not task.done():
                await report(FetchProgress(url, measure_fetched(directory, spec.model.name), total_bytes))
                await asyncio.wait({task}, timeout=_REPORT_INTERVAL_S)
            path = await task
        except (PlanTimedOut, PlanMemoryExceeded, PlanFailed) as error:
            raise ModelFetchFailed(url, f"{error} (--fetch-timeout sets the time)") from error
        finally:
            task.cancel()
            await asyncio.wait({task})
            await asyncio.to_thread(remove_unfinished, directory)
        return msgspec.structs.replace(spec, model=path, model_roots=())


def _measure(outline: Path) -> int:
    try:
        return sum(file.stat().st_size for file in outline.rglob("*") if file.is_file())
    except OSError:
        return 0
