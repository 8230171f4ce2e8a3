"""New weights for a running deployment: fetch, verify, compare, stage, swap."""

from __future__ import annotations

import dataclasses

from bundle.manifest import Manifest
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.launcher import GroupLauncher, WeightsSource
from runtime_svc.deployments.names import check_ref
from runtime_svc.deployments.progress import LoadStage, ProgressFeed
from runtime_svc.engine.engine import WeightsReceipt
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.errors import GraphAbiMismatch, LoadInProgress, TokenizerMismatch


async def load_weights(
    deployment: Deployment,
    ref: str,
    library: BundleLibrary,
    progress: ProgressFeed,
    *,
    policy: InFlightPolicy,
    keep_kv: bool,
) -> WeightsReceipt:
    """Replaces the weights of a deployment. Whatever fails, and a caller that is cancelled before the swap, leaves the
    old ones serving.

    Raises:
        DeploymentNotReady: The deployment does not serve, or its ranks restart.
        RequestInvalid: `ref` is no reference.
        LoadInProgress: Other weights are being loaded.
        RequestsInFlight: Policy REFUSE met running requests.
        GraphAbiMismatch, TokenizerMismatch: The weights do not fit.
        BundleError, BundleSourceUnavailable: See `BundleLibrary`.
        ExecutionError: The ranks could not map them.
    """
    engine = deployment.require_serving(while_recovering=False).engine
    if deployment.weights_lock.locked():
        raise LoadInProgress(deployment.deployment_id)
    async with deployment.weights_lock:
        check_ref(ref)
        engine.check_policy(policy)
        progress.report(LoadStage.RESOLVE)
        resolved = await library.resolve(ref)
        compare_manifests(deployment.bundle.manifest, resolved.manifest)
        progress.report(LoadStage.FETCH)
        bundle = await library.fetch(resolved, lambda *counts: progress.report(LoadStage.FETCH, *counts))
        progress.report(LoadStage.VERIFY)
        await library.verify(bundle, lambda *counts: progress.report(LoadStage.VERIFY, *counts))
        weights = WeightsSource(ref, bundle)
        paths = weights.shard_paths_by_rank()
        progress.report(LoadStage.MAP)
        await engine.stage_weights(paths)
        progress.report(LoadStage.SWAP)
        launcher = engine.launcher
        assert isinstance(launcher, GroupLauncher)
        launcher = dataclasses.replace(launcher, weights=weights)
        return await engine.swap_weights(launcher, paths, policy, keep_kv=keep_kv)


def compare_manifests(serving: Manifest, offered: Manifest) -> None:
    """Checks that the weights of one bundle can run in the executables of another, on the same text.

    Raises:
        GraphAbiMismatch, TokenizerMismatch: They cannot.
    """
    if serving.graph_abi_digest != offered.graph_abi_digest:
        raise GraphAbiMismatch(serving.graph_abi_digest, offered.graph_abi_digest)
    expected, actual = (one.tokenizer.digest if one.tokenizer is not None else "none" for one in (serving, offered))
    if expected != actual:
        raise TokenizerMismatch(expected, actual)
