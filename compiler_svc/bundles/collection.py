"""Writes tags and collects garbage at the start and at intervals, without a client's request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from bundle.errors import BundleError, KilnError
from compiler_svc.bundles.store import BundleStore

INTERVAL_S: Final = 600.0

_log = structlog.get_logger("compiler")


@asynccontextmanager
async def collecting(store: BundleStore, interval_s: float = INTERVAL_S) -> AsyncIterator[None]:
    """Writes tags and collects now, and then at intervals until the context ends.

    The first time repairs tags that a killed process did not write or that someone changed, and removes what killed
    builds, removals and imports left: bundles without a version and blobs without a bundle.
    """
    await _warn_of_lost_bundles(store)
    await _collect(store)
    task = asyncio.create_task(_collect_regularly(store, interval_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _collect_regularly(store: BundleStore, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _collect(store)


async def _collect(store: BundleStore) -> None:
    await store.write_tags()
    try:
        collected = await store.collect_garbage()
    except KilnError as error:
        _log.warning("garbage cannot be collected", reason=error.reason, error=str(error))
    except OSError as error:
        _log.warning("garbage cannot be collected", error=str(error))
    else:
        if collected.freed.blob_count:
            _log.info(
                "garbage collected",
                bundle_count=collected.bundle_count,
                blob_count=collected.freed.blob_count,
                size_bytes=collected.freed.size_bytes,
            )


async def _warn_of_lost_bundles(store: BundleStore) -> None:
    # This service never causes such an error: the store was edited, or another store is mounted in its place.
    with suppress(BundleError):
        for ref in await store.list_lost_versions():
            _log.warning("the store has lost the bundle of a version", ref=ref)
