"""Loads new weights into a running deployment: compares, fetches, verifies, stages and swaps them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from bundle.manifest import Manifest
from execution.errors import WeightsNotStaged
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.launcher import GroupLauncher, WeightsSource
from runtime_svc.deployments.memory import HeldWeights, MemoryNeed
from runtime_svc.deployments.progress import LoadStage, ProgressFeed
from runtime_svc.deployments.records import WeightsRecord
from runtime_svc.deployments.resources import Resources
from runtime_svc.engine.operations import InFlightPolicy, WeightsReceipt
from runtime_svc.engine.ranks import RankLauncher
from runtime_svc.engine.weights import EngineWeights, WeightSwap
from runtime_svc.errors import GraphAbiMismatch, LoadInProgress, TokenizerMismatch, WeightsMissing


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsLoad:
    """One load of weights; its swap treats running requests by `policy`, and zeroes the KV cache unless `keep_kv`.

    `find` resolves the reference. With `keep_old`, the weights that it replaces stay mapped for a way back.
    """

    ref: str
    find: Callable[[], Awaitable[ResolvedBundle]]
    progress: ProgressFeed
    policy: InFlightPolicy
    keep_kv: bool
    keep_old: bool = False


@dataclasses.dataclass(slots=True)
class _Replacement:
    """What becomes of the record and the memory of a deployment when it gets other weights."""

    deployment: Deployment
    weights: EngineWeights
    resources: Resources
    save: Callable[[], asyncio.Task[None]]
    on_released: Callable[[], None]
    record: WeightsRecord
    need: MemoryNeed
    #: The memory of the replaced weights, and the task that writes the record, once the new ones are in use.
    replaced: MemoryNeed | None = None
    saving: asyncio.Task[None] | None = None

    async def swap(self, load: WeightsLoad, launcher: RankLauncher, paths: Mapping[int, Path] | None) -> WeightsReceipt:
        """Swaps between two steps; see `WeightSwap` for launcher and paths."""
        load.progress.report(LoadStage.SWAP)
        receipt = await self.weights.swap(
            WeightSwap(
                launcher,
                paths,
                load.policy,
                keep_kv=load.keep_kv,
                keep_old=load.keep_old,
                on_swapped=self._take_over,
                on_released=self._release,
            )
        )
        assert self.saving is not None
        await asyncio.shield(self.saving)
        return receipt

    def _take_over(self) -> None:
        one, old = self.deployment, self.deployment.weights
        if old is not None:
            one.old_weights = HeldWeights(old.ref, old.digest, old.version, one.weights_memory)
        self.replaced, one.weights, one.weights_memory = one.weights_memory, self.record, self.need
        self.saving = self.save()

    def _release(self) -> None:
        assert self.replaced is not None
        self.deployment.old_weights = None
        self.resources.unstage(self.deployment, self.replaced)
        self.on_released()


async def load_weights(
    deployment: Deployment,
    load: WeightsLoad,
    library: BundleLibrary,
    resources: Resources,
    *,
    save: Callable[[], asyncio.Task[None]],
    on_released: Callable[[], None],
) -> WeightsReceipt:
    """Replaces the weights of a deployment; `resources` have memory for old and new ones while both are mapped.

    If the load fails, or the caller is cancelled before the swap, the old ones serve on. Begins to `save` once the
    deployment names the new weights, even if the caller was cancelled during the swap, and calls `on_released` when the
    old ones are no longer mapped. Reads no file of weights that are still mapped.

    Raises:
        StateUnwritable: The new weights serve, but could not be saved.
    """
    engine = deployment.require_loaded().engine
    weights = engine.weights
    if deployment.weights_lock.locked():
        raise LoadInProgress(deployment.deployment_id)
    async with deployment.weights_lock:
        engine.check_policy(load.policy)
        load.progress.report(LoadStage.RESOLVE)
        replace = partial(_Replacement, deployment, weights, resources, save, on_released)
        held = deployment.old_weights
        is_named = held is not None and load.ref in {held.digest, held.version}
        resolved = None if is_named else await _resolve(deployment, load)
        if held is not None and weights.old is not None and (resolved is None or resolved.digest == held.digest):
            record = WeightsRecord(ref=load.ref, digest=held.digest, version=held.version)
            # Otherwise the ranks that mapped them have ended.
            with suppress(WeightsNotStaged):
                return await replace(record, held.need).swap(load, weights.old.launcher, None)
        resolved = resolved or await _resolve(deployment, load)
        await weights.give_up_old()
        resources.stage(deployment, resolved.manifest)
        record = WeightsRecord(ref=resolved.ref, digest=resolved.digest, version=resolved.version)
        replacement = replace(record, resources.find_weights_need(resolved.manifest))
        try:
            source = await _stage(weights, load, resolved, library)
            launcher = weights.launcher
            assert isinstance(launcher, GroupLauncher)
            launcher = dataclasses.replace(launcher, weights=source)
            return await replacement.swap(load, launcher, source.shard_paths_by_rank())
        finally:
            if replacement.replaced is None:
                resources.unstage(deployment, replacement.need)


async def _resolve(deployment: Deployment, load: WeightsLoad) -> ResolvedBundle:
    """Finds a bundle and checks that its weights fit."""
    resolved = await load.find()
    assert deployment.bundle is not None
    if not resolved.manifest.has_weights:
        has_adapter = resolved.manifest.adapters and not resolved.manifest.has_executables
        detail = "LoadAdapter takes its adapter" if has_adapter else "it was compiled without them"
        raise WeightsMissing(resolved.ref, detail)
    compare_manifests(deployment.bundle.manifest, resolved.manifest)
    return resolved


async def _stage(
    weights: EngineWeights, load: WeightsLoad, resolved: ResolvedBundle, library: BundleLibrary
) -> WeightsSource:
    """Has the ranks map the weights of a bundle beside those in use."""
    report = load.progress.report
    report(LoadStage.FETCH)
    bundle = await library.fetch(resolved, lambda *counts: report(LoadStage.FETCH, *counts))
    report(LoadStage.VERIFY)
    await library.verify(bundle, lambda *counts: report(LoadStage.VERIFY, *counts))
    source = WeightsSource(resolved.ref, bundle)
    report(LoadStage.MAP)
    await weights.stage(source.shard_paths_by_rank(), load.policy)
    return source


def compare_manifests(serving: Manifest, offered: Manifest) -> None:
    """Checks that the weights of one bundle can run in the executables of another, on the same text."""
    if serving.graph_abi_digest != offered.graph_abi_digest:
        raise GraphAbiMismatch(serving.graph_abi_digest, offered.graph_abi_digest)
    expected, actual = (one.tokenizer.digest if one.tokenizer is not None else "none" for one in (serving, offered))
    if expected != actual:
        raise TokenizerMismatch(expected, actual)
