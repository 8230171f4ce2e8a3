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
    """One load of weights.

    Attributes:
        find: Resolves the bundle.
        progress: Gets each stage.
        policy: How the swap treats running requests.
        keep_kv: Whether the KV cache stays as it is; otherwise the swap zeroes it.
    """

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
    """Replaces the weights of a deployment. If the load fails, or the caller is cancelled before the swap, the old ones
    serve on.

    Args:
        deployment: The deployment that gets them.
        load: The bundle to find, and the options of the load.
        library: Fetches and verifies the bundle.
        resources: Their memory holds old and new weights until the swap is over.
        on_swapped: Called once the deployment names the new weights, even if the caller was cancelled during the swap.

    Raises:
        DeploymentNotReady: The deployment is not loaded, or its ranks restart.
        LoadInProgress: Other weights are being loaded.
        RequestsInFlight: The policy is REFUSE, and a request runs.
        WeightsMissing, GraphAbiMismatch, TokenizerMismatch: The weights do not fit.
        MemoryUnavailable: The new weights do not fit beside the old ones.
        BundleError, BundleSourceUnavailable: See `BundleLibrary`.
        ExecutionError: The ranks could not map them.
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
            raise WeightsMissing(resolved.ref)
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
    """Checks that the weights of one bundle can run in the executables of another, on the same text.

    Raises:
        GraphAbiMismatch, TokenizerMismatch: The graph ABI or the tokenizer differs.
    """
    if serving.graph_abi_digest != offered.graph_abi_digest:
        raise GraphAbiMismatch(serving.graph_abi_digest, offered.graph_abi_digest)
    expected, actual = (one.tokenizer.digest if one.tokenizer is not None else "none" for one in (serving, offered))
    if expected != actual:
        raise TokenizerMismatch(expected, actual)
