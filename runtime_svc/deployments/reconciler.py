"""Brings deployments into line with the deployments file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from bundle.errors import KilnError
from runtime_svc.deployments.declared import read_deployments
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.deployment_spec import DeploymentSpec, Origin
from runtime_svc.deployments.errors import DeploymentsFileInvalid
from runtime_svc.deployments.records import AdapterRecord, RecordStore
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.operations import InFlightPolicy

_log = structlog.get_logger("reconciler")


class Reconciler:
    """Loads declared deployments that are missing; unloads those that the file has dropped or changed or that failed.

    It never changes deployments that clients loaded by calls.
    """

    def __init__(self, deployments: Deployments, records: RecordStore, path: Path | None, *, timeout_s: float) -> None:
        """Changes nothing; `start` and `reload` do. Without `path`, what an earlier file declared stays.

        Running requests may take `timeout_s` to finish before an unload aborts them.
        """
        self._deployments = deployments
        self._records = records
        self._path = path
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Loads recorded deployments of an earlier process, then declared ones that are missing.

        A recorded deployment that came from the file is forgotten if the file has dropped or changed it since.
        """
        declared = None if self._path is None else read_deployments(self._path)
        records = self._records.deployments.list()
        adapters: dict[str, list[AdapterRecord]] = {}
        for adapter in self._records.adapters.list():
            adapters.setdefault(adapter.deployment_id, []).append(adapter)
        await self._deployments.quarantine.open([*(record.spec for record in records), *(declared or ())])
        for record in records:
            if record.origin is Origin.FILE and declared is not None and record.spec not in declared:
                await self._records.deployments.forget(record.spec.deployment_id)
            else:
                self._deployments.restore(record, adapters.get(record.key, ()))
        self._load_missing(declared or ())

    async def reload(self) -> None:
        """Reads the file again and reconciles. If the file is invalid, logs its mistakes and changes no deployment."""
        if self._path is None:
            _log.warning("nothing to reload: the runtime was started without --deployments")
            return
        async with self._turn:
            try:
                declared = await asyncio.to_thread(read_deployments, self._path)
            except DeploymentsFileInvalid as error:
                _log.error("deployments file is not followed", error=str(error))
                return
            stale = [
                one
                for one in self._deployments.list()
                if one.origin is Origin.FILE and (one.spec not in declared or one.state is DeploymentState.FAILED)
            ]
            # Before the loads, because new deployments may need the same cores.
            await asyncio.gather(*map(self._unload, stale))
            await asyncio.gather(*map(self._lift_quarantine, declared))
            self._load_missing(declared)
            _log.info("deployments file is followed", unloaded=[one.deployment_id for one in stale])

    def _load_missing(self, declared: Sequence[DeploymentSpec]) -> None:
        present = {deployment.deployment_id: deployment for deployment in self._deployments.list()}
        for spec in declared:
            existing = present.get(spec.deployment_id)
            if existing is None:
                self._deployments.declare(spec)
            elif existing.origin is not Origin.FILE:
                _log.warning("declared deployment exists already, made by a call", deployment_id=spec.deployment_id)

    async def _lift_quarantine(self, spec: DeploymentSpec) -> None:
        try:
            await self._deployments.quarantine.lift(spec.deployment_id)
        except KilnError as error:
            _log.warning("quarantine is not lifted", deployment_id=spec.deployment_id, error=str(error))

    async def _unload(self, deployment: Deployment) -> None:
        deployment_id = deployment.deployment_id
        waiting = asyncio.create_task(self._deployments.unload(deployment_id, InFlightPolicy.WAIT))
        try:
            await asyncio.wait([waiting], timeout=self._timeout_s)
            if not waiting.done():
                await self._deployments.unload(deployment_id, InFlightPolicy.ABORT)
            await waiting
        except KilnError as error:
            _log.warning("unload failed", deployment_id=deployment_id, error=str(error))
