"""Leases on the bundles in use, so that the bundle service keeps their blobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from bundle.errors import BundleNotFound, KilnError
from runtime_svc.bundles.source import BundleSource

_log = structlog.get_logger("leases")

#: How long the bundle service keeps the bundles of a runtime that has vanished.
LEASE_S: Final = 24 * 3600.0
RENEW_S: Final = 3600.0
RETRY_S: Final = 15.0


class LeaseKeeper:
    """Takes, renews and gives back leases. While the bundle service does not answer, it retries in the background."""

    def __init__(
        self,
        source: BundleSource,
        holder: str,
        digests: Callable[[], set[str]],
        *,
        renew_s: float = RENEW_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Takes no lease before `run`, which pauses for `retry_s` after a failed call."""
        self._source = source
        self._holder = holder
        self._digests = digests
        self._renew_s = renew_s
        self._retry_s = retry_s
        self._changed = asyncio.Event()
        #: When each lease was taken or last renewed, in seconds of the monotonic clock, by digest.
        self._taken_s: dict[str, float] = {}
        self._is_complaining = False

    def wake(self) -> None:
        """Makes `run` look at the bundles in use now."""
        self._changed.set()

    async def run(self) -> None:
        """Keeps leases until it is cancelled."""
        while True:
            self._changed.clear()
            is_settled = await self._settle()
            timeout_s = self._renew_s / 4 if is_settled else self._retry_s
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _settle(self) -> bool:
        """Takes, renews and gives back the leases that are due; returns False if a call failed."""
        used, now_s = self._digests(), time.monotonic()
        try:
            for digest in sorted(used):
                if now_s - self._taken_s.get(digest, float("-inf")) >= self._renew_s:
                    await self._take(digest)
            for digest in sorted(self._taken_s.keys() - used):
                await self._source.release(digest, self._holder)
                del self._taken_s[digest]
        except KilnError as error:
            if not self._is_complaining:
                _log.warning("leases are not kept", error=str(error))
            self._is_complaining = True
            return False
        if self._is_complaining:
            _log.info("leases are kept again")
        self._is_complaining = False
        return True

    async def _take(self, digest: str) -> None:
        try:
            await self._source.lease(digest, self._holder, LEASE_S)
        except BundleNotFound:
            # The service has deleted a bundle in use here, or it came from a directory: a lease cannot keep it.
            _log.warning("the bundle service has no such bundle to lease", digest=digest)
        self._taken_s[digest] = time.monotonic()
