"""Follows aliases: when an alias moves, its deployments load the weights of the version that it names now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from bundle.errors import BlobCorrupt, KilnError, ManifestInvalid
from bundle.shortage import naming_shortages
from execution.errors import ExecutableInvalid, WeightsInvalid
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.progress import ProgressFeed
from runtime_svc.deployments.registry import Deployments
from runtime_svc.deployments.retries import backoff_delays
from runtime_svc.deployments.weights import WeightsLoad
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.errors import GraphAbiMismatch, TokenizerMismatch, WeightsMissing
from runtime_svc.quarantine_errors import WeightsQuarantined

_log = structlog.get_logger("follower")

#: Errors that a retry cannot mend: the follower waits for another version.
FINAL_ERRORS: Final = (
    GraphAbiMismatch,
    TokenizerMismatch,
    WeightsMissing,
    WeightsInvalid,
    ExecutableInvalid,
    ManifestInvalid,
    BlobCorrupt,
)
MAX_RETRY_S: Final = 300.0


@dataclass(slots=True)
class _Pursuit:
    """The tries of one deployment to load one version."""

    digest: str
    delays_s: Iterator[float]
    #: When to try again, in seconds of the event loop's clock; None after a final error.
    due_s: float | None = 0.0
    task: asyncio.Task[None] | None = field(default=None)


class AliasFollower:
    """Resolves each followed alias once per interval, and loads weights if the alias has moved."""

    def __init__(self, deployments: Deployments, *, interval_s: float) -> None:
        """Polls nothing before `run`; then about every `interval_s` seconds."""
        self._deployments = deployments
        self._interval_s = interval_s
        self._pursuits: dict[Deployment, _Pursuit] = {}

    async def run(self) -> None:
        """Follows aliases until it is cancelled; then cancels the weight loads that it has begun."""
        try:
            while True:
                await self._poll()
                # At random, so that the runtimes of a fleet do not all poll at once.
                await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))
        finally:
            tasks = [pursuit.task for pursuit in self._pursuits.values() if pursuit.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        following = [deployment for deployment in self._deployments.list() if deployment.followed_alias]
        self._pursuits = {one: pursuit for one, pursuit in self._pursuits.items() if one in following}
        loaded = [one for one in following if one.state in {DeploymentState.READY, DeploymentState.AWAITING_WEIGHTS}]
        await asyncio.gather(*(self._poll_ref(ref, loaded) for ref in {one.followed_alias for one in loaded}))

    async def _poll_ref(self, ref: str, deployments: list[Deployment]) -> None:
        followers = [deployment for deployment in deployments if deployment.followed_alias == ref]
        try:
            with naming_shortages():
                resolved = await self._deployments.library.resolve(ref)
        except KilnError as error:
            for deployment in followers:
                deployment.follow_error, deployment.follow_digest = error, ""
            return
        for deployment in followers:
            self._consider(deployment, resolved)

    def _consider(self, deployment: Deployment, resolved: ResolvedBundle) -> None:
        pursuit = self._pursuits.get(deployment)
        if pursuit is not None and pursuit.task is not None:
            return
        if deployment.weights is not None and deployment.weights.digest == resolved.digest:
            self._pursuits.pop(deployment, None)
            deployment.follow_error = None
            return
        try:
            self._deployments.quarantine.check(deployment.spec, resolved.digest)
        except WeightsQuarantined as error:
            deployment.follow_error, deployment.follow_digest = error, resolved.digest
            return
        if pursuit is None or pursuit.digest != resolved.digest:
            pursuit = _Pursuit(resolved.digest, backoff_delays(self._interval_s, MAX_RETRY_S))
            self._pursuits[deployment] = pursuit
        now_s = asyncio.get_running_loop().time()
        if pursuit.due_s is not None and pursuit.due_s <= now_s:
            pursuit.task = asyncio.create_task(self._pursue(deployment, pursuit, resolved))

    async def _pursue(self, deployment: Deployment, pursuit: _Pursuit, resolved: ResolvedBundle) -> None:
        async def find() -> ResolvedBundle:
            return resolved

        name = deployment.deployment_id
        load = WeightsLoad(find, ProgressFeed(), InFlightPolicy.WAIT, keep_kv=False)
        try:
            with naming_shortages():
                async with self._deployments.quarantine.recording(deployment.spec, resolved.digest):
                    receipt = await self._deployments.load_weights(deployment, load)
        except KilnError as error:
            deployment.follow_error, deployment.follow_digest = error, resolved.digest
            is_final = isinstance(error, FINAL_ERRORS)
            _log.warning("alias not followed", deployment_id=name, is_final=is_final, error=str(error))
            now_s = asyncio.get_running_loop().time()
            pursuit.due_s = None if is_final else now_s + next(pursuit.delays_s)
        else:
            deployment.follow_error = None
            _log.info("alias followed", deployment_id=name, digest=resolved.digest, weight_epoch=receipt.weight_epoch)
        finally:
            pursuit.task = None
