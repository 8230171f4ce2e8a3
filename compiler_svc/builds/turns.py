"""Turns of builds, and sweeping up after those that failed when nobody builds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

from bundle.errors import BundleError
from bundle.layout import Layout
from bundle.removal import remove_unneeded_blobs

#: Other tools may be copying a bundle into the store.
_MIN_AGE_S: Final = 600.0

_log = structlog.get_logger("compiler")


class BuildTurns:
    """Lets a limited number of builds run at once."""

    def __init__(self, layout: Layout, max_builds: int) -> None:
        """Takes the store that builds put blobs into."""
        self._layout = layout
        self._places = asyncio.Semaphore(max_builds)
        # Held while sweeping: a build that begins meanwhile could come to rely on a blob that is just being swept up.
        self._entrance = asyncio.Lock()
        self._num_running = 0

    @property
    def are_taken(self) -> bool:
        """Whether a build that begins now has to wait."""
        return self._places.locked()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it as long as the context lasts."""
        async with self._places:
            async with self._entrance:
                self._num_running += 1
            try:
                yield
            except BaseException:
                self._num_running -= 1
                await self._sweep_when_idle()
                raise
            self._num_running -= 1

    async def _sweep_when_idle(self) -> None:
        async with self._entrance:
            if self._num_running == 0:
                await asyncio.to_thread(sweep_store, self._layout)


def sweep_store(layout: Layout) -> None:
    """Deletes what unfinished builds left in the store. A store that cannot be swept is left as it is."""
    try:
        freed = remove_unneeded_blobs(layout, min_age_s=_MIN_AGE_S)
    except BundleError as error:
        _log.warning("the store cannot be swept", reason=error.reason, error=str(error))
    else:
        if freed.blob_count:
            _log.info("store swept", blob_count=freed.blob_count, size_bytes=freed.size_bytes)
