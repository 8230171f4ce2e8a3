"""Loads a resolved bundle: fetches and verifies its blobs, starts ranks and engine."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from functools import partial

from bundle.errors import ManifestInvalid
from bundle.store.reader import Bundle
from execution.forkserver.client import ForkserverClient
from execution.text.control import Load
from execution.text.errors import TextInvalid
from execution.text.handle import TextLimits
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.admission.limits import RequestLimits
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.captures.directory import CaptureDirectory
from runtime_svc.deployments.adapters import enter_adapters, open_adapter
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment, Serving
from runtime_svc.deployments.deployment_spec import DeploymentDefaults
from runtime_svc.deployments.launcher import GroupLauncher, StartRanks, WeightsSource
from runtime_svc.deployments.progress import LoadStage
from runtime_svc.deployments.weights import compare_manifests
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.engine import Engine
from runtime_svc.text.codec import TextCodec
from runtime_svc.text.text_queue import TextWorkers


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads deployments.

    `engine` bounds every engine, but for the time that deployments state. `workers` are threads that check and convert
    large requests; `texts` is the forkserver of text processes. Without `captures`, requests cannot capture inputs.
    """

    library: BundleLibrary
    start_ranks: StartRanks
    engine: EngineConfig
    workers: TextWorkers
    texts: ForkserverClient
    text_limits: TextLimits
    defaults: DeploymentDefaults
    cores: CorePool
    captures: CaptureDirectory | None = None

    async def load(self, deployment: Deployment) -> Serving:
        """Fetches and verifies the bundles, then starts ranks and engine; reports each stage."""
        assert deployment.bundle is not None
        report = deployment.progress.report
        report(LoadStage.RESOLVE)
        report(LoadStage.FETCH)
        bundle = await self.library.fetch(deployment.bundle, lambda *counts: report(LoadStage.FETCH, *counts))
        launcher = GroupLauncher(
            deployment_id=deployment.deployment_id,
            executables=bundle,
            weights=await self._find_weights(deployment, bundle),
            library=self.library,
            start=self.start_ranks,
            num_threads=deployment.threads_per_core,
            cores=deployment.cores,
            core_pool=self.cores,
            report=report,
        )
        # Beside the ranks, because both take a while.
        opening = asyncio.create_task(self._open_text(deployment.deployment_id, bundle))
        chunks = dataclasses.replace(self.engine.chunks, target_s=deployment.target_inter_token_latency_s)
        config = dataclasses.replace(self.engine, chunks=chunks)
        try:
            engine = await Engine.start(
                deployment.deployment_id, bundle.manifest, config, launcher, weight_epoch=deployment.weight_epoch
            )
        except BaseException:
            await _abandon(opening)
            raise
        engine.weights.launcher = dataclasses.replace(launcher, report=None)
        try:
            text = await opening
            if text.decodes_steps:
                engine.requests.decode_step = text.decode_step
            if text.constraints is not None:
                engine.requests.constraints.follow = text.constraints.follow
                engine.requests.constraints.on_end = text.constraints.end
            capabilities = Capabilities.from_manifest(
                bundle.manifest,
                input_capture=self.captures is not None,
                engine=self.engine,
            )
            await enter_adapters(deployment, engine, bundle)
            limits = RequestLimits.of(capabilities, text.max_token_bytes)
            opening_adapters = partial(open_adapter, deployment, self.library)
            return Serving(engine, text, capabilities, self.workers, limits, opening_adapters, self.captures)
        except BaseException:
            await engine.close()
            await _abandon(opening)
            raise

    async def _open_text(self, deployment_id: str, bundle: Bundle) -> TextCodec:
        try:
            return await TextCodec.open(
                deployment_id,
                _describe_text(bundle),
                forkserver=self.texts,
                limits=self.text_limits,
                workers=self.workers,
            )
        except TextInvalid as error:
            raise ManifestInvalid(f"tokenizer: {error}", bundle.digest) from error

    async def _find_weights(self, deployment: Deployment, executables: Bundle) -> WeightsSource | None:
        """Returns the weights to start with: the bundle's own or those loaded last; None while weights are awaited."""
        weights = deployment.weights
        if weights is None:
            return None
        if weights.digest == executables.digest:
            return WeightsSource(weights.ref, executables)
        resolved = await self.library.resolve(weights.digest)
        compare_manifests(executables.manifest, resolved.manifest)
        return WeightsSource(weights.ref, await self.library.fetch(resolved, lambda *_: None))


def _describe_text(bundle: Bundle) -> Load | None:
    tokenizer = bundle.manifest.tokenizer
    files = {file.title: bundle.blob_path(file.blob) for file in tokenizer.files} if tokenizer is not None else {}
    if tokenizer is None or "tokenizer.json" not in files:
        return None
    return Load.of(
        files["tokenizer.json"],
        files.get("tokenizer_config.json"),
        chat_templates=tokenizer.all_templates,
        tokens=bundle.manifest.tokens,
    )


async def _abandon(opening: asyncio.Task[TextCodec]) -> None:
    """Ends a text process that is being started or has just been."""
    opening.cancel()
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()
