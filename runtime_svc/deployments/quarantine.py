"""Keeps loads that take the process down from being repeated by themselves.

A load is recorded before anything of its bundle is opened, and its record says so when it has ended. A load that the
next process finds under way was there when this one died. Both loads that the runtime begins by itself are recorded:
those of deployments, and those of the weights to which a followed alias has moved.

- If it was the only one, the death counts against it. At `MAX_DEATHS` it is quarantined.
- If there were several, each of them becomes a suspect, with one death. Suspects load alone, one after another, so the
  next death has one cause, and a load that only was in bad company ends and is a suspect no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec
import structlog

from bundle.errors import KilnError
from bundle.host.shortage import lasting_delays, outlast_shortages
from edge.supervision import begin_task
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.records import LoadRecord, RecordStore
from runtime_svc.deployments.retries import RETRIED
from runtime_svc.errors import DeploymentNotReady, LoadInProgress, LoadQuarantined, WeightsQuarantined

#: Deaths of the process after which a load is quarantined.
MAX_DEATHS: Final = 2
#: Seconds for which the end of a load waits until it is recorded.
MAX_WAIT_S: Final = 1.0

#: Attempts that end so prove nothing: they are repeated, and some have not opened anything.
_INCONCLUSIVE: Final = (asyncio.CancelledError, DeploymentNotReady, LoadInProgress, *RETRIED)

_log = structlog.get_logger("deployments")


class LoadQuarantine:
    """The loads that are under way, are suspects, or are quarantined, by the keys of their records."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._loads: dict[str, LoadRecord] = {}
        self._num_loading = 0
        self._is_one_alone = False
        self._turn_ended = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def open(self, specs: Collection[DeploymentSpec]) -> None:
        """Takes in what the process before left, and counts its death. Call it before anything loads.

        It forgets what is known of deployments other than `specs`, those that there are to load.
        """
        found = self._records.loads.list()
        under_way = [one for one in found if one.is_under_way]
        for one in found:
            deaths = one.deaths
            if one.is_under_way:
                # One of several is a suspect at most: another one may have done it.
                deaths = deaths + 1 if len(under_way) == 1 else max(1, deaths)
                _log.warning("a load was under way when the process died", load=one.key, deaths=deaths)
            if one.spec in specs:
                self._loads[one.key] = msgspec.structs.replace(one, deaths=deaths, is_under_way=False)
            if self._loads.get(one.key) != one:
                await self._write(one.key)

    def check(self, spec: DeploymentSpec, weights_digest: str = "") -> None:
        """Checks that a deployment, or the weights of another bundle for it, may be loaded without being asked for."""
        deaths = self._find(spec, weights_digest).deaths
        if deaths < MAX_DEATHS:
            return
        if weights_digest:
            raise WeightsQuarantined(spec.deployment_id, spec.ref, weights_digest, deaths)
        raise LoadQuarantined(spec.deployment_id, spec.ref, deaths)

    @asynccontextmanager
    async def recording(self, spec: DeploymentSpec, weights_digest: str = "") -> AsyncIterator[None]:
        """Records that a load is under way inside the block, which begins when it is the load's turn."""
        load = self._find(spec, weights_digest)
        is_over = True
        async with self._turn(is_alone=load.deaths > 0):
            self._loads[load.key] = msgspec.structs.replace(load, is_under_way=not self._is_closed)
            try:
                await self._write(load.key)
                yield
            except _INCONCLUSIVE:
                is_over = False
                raise
            finally:
                self._end(load.key, is_over=is_over or not load.deaths)
        if self._writes:
            # The client that learns of the success may rely on the record, unless the disk takes too long.
            await asyncio.wait(self._writes, timeout=MAX_WAIT_S)

    async def lift(self, deployment_id: str) -> None:
        """Forgets what is known of a deployment's loads that have ended: someone has asked for it or for its end."""
        of_deployment = [key for key, one in self._loads.items() if one.spec.deployment_id == deployment_id]
        ended = [key for key in of_deployment if not self._loads[key].is_under_way]
        # All before the first write, because another caller may lift the same while the disk works.
        for key in ended:
            del self._loads[key]
        for key in ended:
            await self._write(key)

    async def close(self) -> None:
        """Records that no load is under way any more: the end of the process is no death from now on."""
        self._is_closed = True
        for write in self._writes:
            write.cancel()
        # The database may be closed next.
        await asyncio.gather(*self._writes, return_exceptions=True)
        for key, one in [*self._loads.items()]:
            if one.is_under_way:
                self._loads[key] = msgspec.structs.replace(one, is_under_way=False)
                try:
                    await self._write(key)
                except KilnError as error:
                    _log.warning("the end of a load is not recorded", load=key, error=str(error))

    def _find(self, spec: DeploymentSpec, weights_digest: str) -> LoadRecord:
        """What is known of a load, as one that is not under way; of a load that is not known, no death."""
        unknown = LoadRecord(spec=spec, deaths=0, is_under_way=False, weights_digest=weights_digest)
        known = self._loads.get(unknown.key, unknown)
        return known if known.spec == spec else unknown

    @asynccontextmanager
    async def _turn(self, *, is_alone: bool) -> AsyncIterator[None]:
        while self._is_one_alone or (is_alone and self._num_loading):
            self._turn_ended.clear()
            await self._turn_ended.wait()
        self._num_loading += 1
        self._is_one_alone = is_alone
        try:
            yield
        finally:
            self._num_loading -= 1
            self._is_one_alone = False
            self._turn_ended.set()

    def _end(self, key: str, *, is_over: bool) -> None:
        """Records that a load is not under way any more, as soon as the disk takes it."""
        if self._is_closed:
            return
        one = self._loads.pop(key, None)
        if one is None:
            # The same weights were loading for a deployment that is gone and for one that has taken its id.
            return
        if not is_over:
            self._loads[key] = msgspec.structs.replace(one, is_under_way=False)
        begin_task(self._write_at_last(key), self._writes)

    async def _write_at_last(self, key: str) -> None:
        try:
            await outlast_shortages(partial(self._write, key), lasting_delays())
        except KilnError as error:
            _log.warning("the end of a load is not recorded", load=key, error=str(error))

    async def _write(self, key: str) -> None:
        """Writes what is known now, so that a late write is right, too."""
        one = self._loads.get(key)
        if one is None:
            await self._records.loads.forget(key)
        else:
            await self._records.loads.save(one)
