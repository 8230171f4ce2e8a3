"""Writes tags and collects garbage at the start and at intervals, without a client's request."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

import structlog

from bundle.errors import BundleError, KilnError
from compiler_svc.bundles.store import BundleStore

INTERVAL_S: Final = 600.0

_log = structlog.get_logger("compiler")


class Collection:
    """Writes tags and collects at intervals.

    The first time repairs tags that a killed process did not write or that someone changed, and removes what killed
    builds, removals and imports left: bundles without a version and blobs without a bundle.
    """

    def __init__(self, store: BundleStore, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._interval_s = interval_s
        self._due_s = time.monotonic()

    async def run(self) -> None:
        """Collects whenever it is due, until it is cancelled."""
        while True:
            await asyncio.sleep(self._due_s - time.monotonic())
            await self.collect()

    async def collect(self) -> None:
        """Collects now; the next time is due an interval later."""
        await self._store.write_tags()
        try:
            collected = await self._store.collect_garbage()
        except KilnError as error:
            _log.warning("garbage cannot be collected", reason=error.reason, error=str(error))
        else:
            if collected.freed.blob_count:
                _log.info(
                    "garbage collected",
                    bundle_count=collected.bundle_count,
                    blob_count=collected.freed.blob_count,
                    size_bytes=collected.freed.size_bytes,
                )
        self._due_s = time.monotonic() + self._interval_s

    async def warn_of_lost_bundles(self) -> None:
        """Logs the versions whose bundle is missing. This service never causes that: the store was edited, or another
        store is mounted in its place.
        """
        with suppress(BundleError):
            for ref in await self._store.list_lost_versions():
                _log.warning("the store has lost the bundle of a version", ref=ref)
