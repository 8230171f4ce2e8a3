"""Loads new weights into a running deployment: compares, fetches, verifies, stages and swaps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from bundle.manifest import Manifest
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.launcher import GroupLauncher, WeightsSource
from runtime_svc.deployments.progress import LoadStage, ProgressFeed
from runtime_svc.deployments.records import WeightsRecord
from runtime_svc.deployments.resources import Resources
from runtime_svc.engine.operations import InFlightPolicy, WeightsReceipt
from runtime_svc.errors import GraphAbiMismatch, LoadInProgress, TokenizerMismatch, WeightsMissing


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsLoad:
    """One load of weights; its swap treats running requests by `policy`, and zeroes the KV cache unless `keep_kv`."""

    find: Callable[[], Awaitable[ResolvedBundle]]
    progress: ProgressFeed
    policy: InFlightPolicy
    keep_kv: bool


async def load_weights(
    deployment: Deployment,
    load: WeightsLoad,
    library: BundleLibrary,
    resources: Resources,
    on_swapped: Callable[[], None],
) -> WeightsReceipt:
    """Replaces the weights of a deployment; `resources` have memory for old and new ones until the swap is over.

    If the load fails, or the caller is cancelled before the swap, the old ones serve on. Calls `on_swapped` once the
    deployment names the new weights, even if the caller was cancelled during the swap.
    """
    serving = deployment.require_loaded()
    if deployment.weights_lock.locked():
        raise LoadInProgress(deployment.deployment_id)
    async with deployment.weights_lock:
        serving.engine.check_policy(load.policy)
        load.progress.report(LoadStage.RESOLVE)
        resolved = await load.find()
        assert deployment.bundle is not None
        if not resolved.manifest.has_weights:
            has_adapter = resolved.manifest.adapters and not resolved.manifest.has_executables
            detail = "LoadAdapter takes its adapter" if has_adapter else "it was compiled without them"
            raise WeightsMissing(resolved.ref, detail)
        compare_manifests(deployment.bundle.manifest, resolved.manifest)
        with resources.staging(deployment, resolved.manifest):
            need = resources.find_weights_need(resolved.manifest)
            resources.memory.reserve(need)
            try:
                return await _stage_and_swap(deployment, load, resolved, library, on_swapped)
            finally:
                is_used = deployment.weights is not None and deployment.weights.digest == resolved.digest
                if is_used and not deployment.is_gone:
                    need, deployment.weights_memory = deployment.weights_memory, need
                resources.memory.release(need)


async def _stage_and_swap(
    deployment: Deployment,
    load: WeightsLoad,
    resolved: ResolvedBundle,
    library: BundleLibrary,
    on_swapped: Callable[[], None],
) -> WeightsReceipt:
    report = load.progress.report
    report(LoadStage.FETCH)
    bundle = await library.fetch(resolved, lambda *counts: report(LoadStage.FETCH, *counts))
    report(LoadStage.VERIFY)
    await library.verify(bundle, lambda *counts: report(LoadStage.VERIFY, *counts))
    weights = WeightsSource(resolved.ref, bundle)
    paths = weights.shard_paths_by_rank()
    engine = deployment.require_loaded().engine
    report(LoadStage.MAP)
    await engine.stage_weights(paths, load.policy)
    report(LoadStage.SWAP)
    launcher = engine.launcher
    assert isinstance(launcher, GroupLauncher)

    def swapped() -> None:
        deployment.weights = WeightsRecord(ref=resolved.ref, digest=resolved.digest, version=resolved.version)
        on_swapped()

    return await engine.swap_weights(
        dataclasses.replace(launcher, weights=weights), paths, load.policy, keep_kv=load.keep_kv, on_swapped=swapped
    )


def compare_manifests(serving: Manifest, offered: Manifest) -> None:
    """Checks that the weights of one bundle can run in the executables of another, on the same text."""
    if serving.graph_abi_digest != offered.graph_abi_digest:
        raise GraphAbiMismatch(serving.graph_abi_digest, offered.graph_abi_digest)
    expected, actual = (one.tokenizer.digest if one.tokenizer is not None else "none" for one in (serving, offered))
    if expected != actual:
        raise TokenizerMismatch(expected, actual)
