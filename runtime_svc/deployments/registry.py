"""Every deployment of this runtime: loading, finding, unloading."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Final

import structlog

from bundle.errors import KilnError, ManifestInvalid
from bundle.manifest import Manifest
from bundle.reader import Bundle
from execution.errors import IsaUnsupported
from execution.isa import require_isa, supported_isas
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.capabilities import Capabilities
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment, DeploymentState, Serving
from runtime_svc.deployments.launcher import GroupLauncher, StartRanks, WeightsSource
from runtime_svc.deployments.names import check_new_deployment
from runtime_svc.deployments.progress import LoadStage
from runtime_svc.engine.engine import Engine, EngineConfig
from runtime_svc.engine.operations import InFlightPolicy
from runtime_svc.engine.request import Finish, FinishReason
from runtime_svc.engine.requests import aborted
from runtime_svc.errors import (
    DeploymentExists,
    DeploymentNotFound,
    DeploymentNotReady,
    EngineFailed,
    RequestsInFlight,
    ShuttingDown,
)
from runtime_svc.text.chat_template import ChatTemplateError
from runtime_svc.text.codec import TextCodec

_log = structlog.get_logger("deployments")

TARGET_KIND: Final = "cpu"
# Streams that shutting down ends get this long to say so to their clients.
FAREWELL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """How deployments are run.

    Attributes:
        threads_per_core: Threads that a rank computes with on its core.
        engine: Bounds of every engine.
    """

    threads_per_core: int
    engine: EngineConfig


class Deployments:
    """Deployments by id. Loads and unloads go on when their callers leave."""

    def __init__(self, library: BundleLibrary, cores: CorePool, start_ranks: StartRanks, config: RuntimeConfig) -> None:
        """Begins with none."""
        self.library = library
        self.cores = cores
        self._start_ranks = start_ranks
        self._config = config
        self._deployments: dict[str, Deployment] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: dict[str, asyncio.Task[int]] = {}
        self._is_shutting_down = False

    def list(self) -> list[Deployment]:
        """Every deployment, by id."""
        return [self._deployments[deployment_id] for deployment_id in sorted(self._deployments)]

    def get(self, deployment_id: str) -> Deployment:
        """One deployment.

        Raises:
            DeploymentNotFound: There is none with this id.
        """
        deployment = self._deployments.get(deployment_id)
        if deployment is None:
            raise DeploymentNotFound(deployment_id)
        return deployment

    def get_for_requests(self, deployment_id: str) -> Deployment:
        """One deployment, to generate with.

        Raises:
            ShuttingDown: No new requests are taken.
            DeploymentNotFound: There is none with this id.
        """
        if self._is_shutting_down:
            raise ShuttingDown
        return self.get(deployment_id)

    async def load(self, ref: str, deployment_id: str, cores: Sequence[int] = ()) -> Deployment:
        """Begins to load a bundle; `Deployment.progress` tells how it goes, `Deployment.failure` how it went.

        The same bundle under the same id is not loaded twice; one that failed is replaced.

        Raises:
            RequestInvalid: Id, reference or cores are malformed.
            BundleNotFound, BundleSourceUnavailable, AbiUnsupported: See `BundleLibrary.resolve`.
            ManifestInvalid: Its parts do not fit each other.
            DeploymentExists: The id belongs to another bundle.
            DeploymentNotReady: The deployment is being unloaded.
            IsaUnsupported, CoresUnavailable: This host cannot run it. Nothing has changed.
            ShuttingDown: Nothing is loaded any more.
        """
        check_new_deployment(deployment_id, ref)
        bundle = await self.library.resolve(ref)
        if self._is_shutting_down:
            raise ShuttingDown
        existing = self._deployments.get(deployment_id)
        if existing is not None and existing.state is not DeploymentState.FAILED:
            if existing.bundle.digest != bundle.digest:
                raise DeploymentExists(deployment_id, existing.bundle.digest)
            if existing.is_unloading:
                raise DeploymentNotReady(deployment_id, existing.state.name)
            return existing
        _check_target(bundle.manifest)
        if existing is not None:
            await self.unload(deployment_id, InFlightPolicy.ABORT)
            return await self.load(ref, deployment_id, cores)
        capabilities = Capabilities.from_manifest(bundle.manifest)
        reserved = self.cores.reserve(bundle.manifest.tp_degree, cores)
        deployment = Deployment(deployment_id, bundle, capabilities, reserved)
        self._deployments[deployment_id] = deployment
        # An empty context, because the engine's log lines must not carry the loading call's request id for ever.
        load = asyncio.create_task(self._load(deployment), name=f"load {deployment_id}", context=Context())
        self._loads[deployment_id] = load
        return deployment

    async def unload(self, deployment_id: str, policy: InFlightPolicy) -> int:
        """Ends a deployment; its cores are free when this returns.

        Returns:
            Requests that it ended.

        Raises:
            DeploymentNotFound: There is none with this id.
            RequestsInFlight: Policy REFUSE, and a request has not ended.
        """
        deployment = self.get(deployment_id)
        if deployment_id in self._unloads:
            if policy is InFlightPolicy.ABORT:
                _abort_requests(deployment)
        else:
            if deployment.engine is not None and policy is InFlightPolicy.REFUSE and len(deployment.engine.requests):
                raise RequestsInFlight(len(deployment.engine.requests))
            deployment.is_unloading = True
            task = asyncio.create_task(self._unload(deployment, policy), name=f"unload {deployment_id}")
            self._unloads[deployment_id] = task
            task.add_done_callback(lambda _: self._unloads.pop(deployment_id))
        return await asyncio.shield(self._unloads[deployment_id])

    async def shut_down(self, timeout_s: float) -> None:
        """Takes no new requests, lets running ones finish, ends what is left after `timeout_s`, ends every rank."""
        self._is_shutting_down = True
        engines = [deployment.engine for deployment in self.list() if deployment.engine is not None]
        drains = [asyncio.create_task(engine.requests.wait_until_empty()) for engine in engines]
        if drains:
            await asyncio.wait(drains, timeout=max(0.0, timeout_s))
        for drain in drains:
            drain.cancel()
        finish = Finish(FinishReason.ERROR, error=ShuttingDown())
        if sum(engine.requests.end_all(lambda _: finish) for engine in engines):
            await asyncio.sleep(FAREWELL_S)
        unloads = (self.unload(deployment.deployment_id, InFlightPolicy.ABORT) for deployment in self.list())
        await asyncio.gather(*unloads)

    async def _load(self, deployment: Deployment) -> None:
        try:
            deployment.succeed(await self._bring_up(deployment))
        except KilnError as error:
            _log.warning("load failed", deployment_id=deployment.deployment_id, error=str(error))
            self._fail(deployment, error)
        except Exception:  # noqa: BLE001 - whatever it is, those who watch must learn that the load has ended
            _log.exception("load failed", deployment_id=deployment.deployment_id)
            self._fail(deployment, EngineFailed(deployment.deployment_id))
        finally:
            del self._loads[deployment.deployment_id]

    def _fail(self, deployment: Deployment, error: KilnError) -> None:
        self.cores.release(deployment.cores)
        deployment.cores = ()
        deployment.fail(error)

    async def _bring_up(self, deployment: Deployment) -> Serving:
        report = deployment.progress.report
        report(LoadStage.RESOLVE)
        report(LoadStage.FETCH)
        bundle = await self.library.fetch(deployment.bundle, lambda *counts: report(LoadStage.FETCH, *counts))
        launcher = GroupLauncher(
            deployment_id=deployment.deployment_id,
            executables=bundle,
            weights=WeightsSource(deployment.bundle.ref, bundle),
            library=self.library,
            start=self._start_ranks,
            num_threads=self._config.threads_per_core,
            report=report,
        )
        engine = await Engine.start(deployment.deployment_id, bundle.manifest, self._config.engine, launcher)
        engine.launcher = dataclasses.replace(launcher, report=None)
        try:
            return Serving(engine, await asyncio.to_thread(_read_text, bundle))
        except BaseException:
            await engine.close()
            raise

    async def _unload(self, deployment: Deployment, policy: InFlightPolicy) -> int:
        load = self._loads.get(deployment.deployment_id)
        if load is not None:
            load.cancel()
            await asyncio.wait([load])
        num_aborted = 0
        if (engine := deployment.engine) is not None:
            if policy is InFlightPolicy.WAIT:
                await engine.requests.wait_until_empty()
            num_aborted = _abort_requests(deployment)
            await engine.close()
        deployment.progress.close()
        self.cores.release(deployment.cores)
        del self._deployments[deployment.deployment_id]
        return num_aborted


def _abort_requests(deployment: Deployment) -> int:
    engine = deployment.engine
    return 0 if engine is None else engine.requests.end_all(lambda request: aborted(request, "UnloadBundle"))


def _check_target(manifest: Manifest) -> None:
    if manifest.target.kind != TARGET_KIND:
        supported = [f"{TARGET_KIND}/{isa}" for isa in supported_isas()]
        raise IsaUnsupported(f"{manifest.target.kind}/{manifest.target.isa}", supported)
    require_isa(manifest)


def _read_text(bundle: Bundle) -> TextCodec:
    tokenizer = bundle.manifest.tokenizer
    if tokenizer is None:
        return TextCodec(None, None)
    files = {file.title: bundle.blob_path(file.blob) for file in tokenizer.files}
    try:
        return TextCodec.from_files(files, tokenizer.chat_template, bundle.manifest.tokens)
    except (ChatTemplateError, ValueError) as error:
        raise ManifestInvalid(f"tokenizer: {error}", bundle.digest) from error
