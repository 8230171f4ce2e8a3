"""Follows aliases: when an alias moves, its deployments load the weights of the version that it names now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import structlog

from bundle.errors import BlobCorrupt, KilnError, ManifestInvalid
from bundle.host.backoff import backoff_delays
from bundle.host.shortage import naming_shortages
from edge.supervision import report_failure
from execution.errors import ExecutableInvalid, WeightsInvalid
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.followed import FollowedVersion
from runtime_svc.deployments.progress import ProgressFeed
from runtime_svc.deployments.registry import Deployments
from runtime_svc.deployments.weights import WeightsLoad
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.errors import GraphAbiMismatch, TokenizerMismatch, WeightsMissing, WeightsQuarantined

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
    #: Why the last try failed; None before the first.
    error: KilnError | None = None


class AliasFollower:
    """Resolves each followed alias once per interval, and loads weights if the alias has moved."""

    def __init__(self, deployments: Deployments, *, interval_s: float) -> None:
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
                _note(deployment, FollowedVersion(error=error))
            return
        for deployment in followers:
            self._consider(deployment, resolved)

    def _consider(self, deployment: Deployment, resolved: ResolvedBundle) -> None:
        pursuit = self._pursuits.get(deployment)
        if pursuit is not None and pursuit.task is not None:
            return
        followed = FollowedVersion(resolved.version, resolved.digest)
        weights = deployment.weights
        if weights is not None and weights.digest == resolved.digest:
            self._pursuits.pop(deployment, None)
            # Another version may have the same bundle; records of earlier releases have none.
            deployment.weights = msgspec.structs.replace(weights, version=resolved.version or weights.version)
            _note(deployment, replace(followed, serves=True))
            return
        try:
            self._deployments.quarantine.check(deployment.spec, resolved.digest)
        except WeightsQuarantined as error:
            _note(deployment, replace(followed, error=error))
            return
        if pursuit is None or pursuit.digest != resolved.digest:
            pursuit = _Pursuit(resolved.digest, backoff_delays(self._interval_s, MAX_RETRY_S))
            self._pursuits[deployment] = pursuit
        if pursuit.error is not None or deployment.followed.error is None:
            _note(deployment, replace(followed, error=pursuit.error))
        # Otherwise the first try of this version is to show whether what was wrong before has passed.
        now_s = asyncio.get_running_loop().time()
        if pursuit.due_s is not None and pursuit.due_s <= now_s:
            pursuit.task = asyncio.create_task(self._pursue(deployment, pursuit, resolved))
            pursuit.task.add_done_callback(report_failure)

    async def _pursue(self, deployment: Deployment, pursuit: _Pursuit, resolved: ResolvedBundle) -> None:
        async def find() -> ResolvedBundle:
            return resolved

        load = WeightsLoad(resolved.ref, find, ProgressFeed(), InFlightPolicy.WAIT, keep_kv=False)
        try:
            with naming_shortages():
                async with self._deployments.quarantine.recording(deployment.spec, resolved.digest):
                    await self._deployments.load_weights(deployment, load)
        except KilnError as error:
            pursuit.error = error
            now_s = asyncio.get_running_loop().time()
            pursuit.due_s = None if isinstance(error, FINAL_ERRORS) else now_s + next(pursuit.delays_s)
            _note(deployment, FollowedVersion(resolved.version, resolved.digest, error=error))
        else:
            _note(deployment, FollowedVersion(resolved.version, resolved.digest, serves=True))
        finally:
            pursuit.task = None


def _note(deployment: Deployment, followed: FollowedVersion) -> None:
    """Tells a deployment what its alias names; the log has each change of what serves and of what fails once."""
    before = deployment.followed
    deployment.followed = followed
    deployment.on_state_changed()
    told = {"deployment_id": deployment.deployment_id, "alias": deployment.followed_alias, "digest": followed.digest}
    if followed.error is not None and followed.cause != before.cause:
        is_final = isinstance(followed.error, FINAL_ERRORS)
        reason, error = followed.error.reason, str(followed.error)
        _log.warning("alias not followed", **told, is_final=is_final, reason=reason, error=error)
    elif followed.serves and not before.serves:
        _log.info("alias followed", **told, weight_epoch=deployment.weight_epoch)
