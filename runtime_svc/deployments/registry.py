"""The registry: loads, finds and unloads the deployments of this runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from bundle.errors import BundleNotFound, KilnError
from bundle.host.backoff import backoff_delays
from bundle.host.shortage import naming_shortages, outlast_shortages
from edge.request_limit import RequestLimit
from edge.supervision import begin_task, report_failure
from runtime_svc.deployments.adapter_names import AdapterNames
from runtime_svc.deployments.adapters import AdapterLoad, load_adapter, prepare_adapter, unload_adapter
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.deployment_spec import DeploymentSpec, Origin
from runtime_svc.deployments.loader import Loader
from runtime_svc.deployments.names import check_spec
from runtime_svc.deployments.quarantine import LoadQuarantine
from runtime_svc.deployments.records import AdapterRecord, DeploymentRecord, RecordStore
from runtime_svc.deployments.resources import Resources, check_bundle
from runtime_svc.deployments.retries import (
    FIRST_RETRY_S,
    MAX_LOST_RETRY_S,
    MAX_RETRY_S,
    NO_ROOM,
    PROCESS_LOST,
    RETRIED,
    may_pass,
)
from runtime_svc.deployments.weights import WeightsLoad, load_weights
from runtime_svc.engine.operations import InFlightPolicy, WeightsReceipt
from runtime_svc.engine.request import Finish, FinishReason
from runtime_svc.engine.requests import aborted
from runtime_svc.errors import (
    CoresUnavailable,
    DeploymentExists,
    DeploymentNotFound,
    DeploymentNotReady,
    EngineFailed,
    LoadQuarantined,
    RequestsInFlight,
    ShuttingDown,
)

_log = structlog.get_logger("deployments")

# When the runtime shuts down, its streams get this long to deliver their terminal events.
FAREWELL_S: Final = 0.5


class Deployments:
    """Deployments by id. Loads and unloads go on if their callers leave; the next process resumes unfinished loads."""

    def __init__(self, loader: Loader, resources: Resources, records: RecordStore) -> None:
        self.library = loader.library
        self.resources = resources
        #: The registry calls it after the bundles in use have changed.
        self.on_bundles_changed: Callable[[], None] = lambda: None
        #: The registry calls it after a deployment has come, changed its state, or gone.
        self.on_states_changed: Callable[[], None] = lambda: None
        self._loader = loader
        self._records = records
        #: The loads that may have taken an earlier process down.
        self.quarantine = LoadQuarantine(records)
        self._deployments: dict[str, Deployment] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: dict[str, asyncio.Task[int]] = {}
        self._saves: set[asyncio.Task[None]] = set()
        self._loading_adapters: set[asyncio.Task[AdapterRecord]] = set()
        self._is_shutting_down = False
        self._last_digests: set[str] | None = None

    def list(self) -> list[Deployment]:
        """Returns every deployment, sorted by id."""
        return [self._deployments[deployment_id] for deployment_id in sorted(self._deployments)]

    def get(self, deployment_id: str) -> Deployment:
        """Returns one deployment."""
        deployment = self._deployments.get(deployment_id)
        if deployment is None:
            raise DeploymentNotFound(deployment_id)
        return deployment

    def get_for_requests(self, deployment_id: str) -> Deployment:
        """Returns one deployment, unless the runtime is shutting down."""
        if self._is_shutting_down:
            raise ShuttingDown
        return self.get(deployment_id)

    def request_limit(self) -> RequestLimit:
        """Returns the size of the largest request that one of the deployments takes."""
        limits = (deployment.request_limits for deployment in self._deployments.values())
        return RequestLimit.join(one.on_the_wire for one in limits if one is not None)

    def bundle_digests(self) -> set[str]:
        """Digests of the bundles in use; during shutdown, of the bundles that the next process will use."""
        if self._last_digests is not None:
            return self._last_digests
        return {digest for deployment in self._deployments.values() for digest in deployment.bundle_digests}

    async def load(self, spec: DeploymentSpec) -> Deployment:
        """Begins to load a bundle; `Deployment.progress` reports its stages, `Deployment.failure` its error.

        If a deployment has the id and the same bundle already, returns it, and lifts the quarantine of weights for it;
        replaces one that has failed.
        """
        check_spec(spec)
        bundle = await self.library.resolve(spec.ref)
        if self._is_shutting_down:
            raise ShuttingDown
        existing = self._deployments.get(spec.deployment_id)
        if existing is not None and existing.state is not DeploymentState.FAILED:
            _require_same(existing, spec, bundle.digest)
            await self.quarantine.lift(spec.deployment_id)
            return existing
        check_bundle(bundle, self.resources)
        if existing is not None:
            await self.unload(spec.deployment_id, InFlightPolicy.ABORT)
            return await self.load(spec)
        deployment = Deployment(spec, Origin.RPC, self._loader.defaults)
        deployment.find(bundle)
        self.resources.reserve(deployment, bundle.manifest)
        self._add(deployment)
        self._begin(deployment)
        return deployment

    def restore(self, record: DeploymentRecord, adapters: Iterable[AdapterRecord] = ()) -> Deployment:
        """Begins to load a recorded deployment, from the same bundle and on the same cores if they are free.

        The bundles of its adapters are opened when requests name them. The load is repeated as `retries` says. A load
        that is quarantined fails.
        """
        deployment = Deployment.from_record(record, self._loader.defaults)
        deployment.adapters = AdapterNames(adapters)
        # Before others load. If too few are free, the load waits for them.
        with suppress(CoresUnavailable):
            self.resources.prefer_cores(deployment)
        return self._add_and_begin(deployment)

    def declare(self, spec: DeploymentSpec) -> Deployment:
        """Begins to load a deployment of the deployments file, as `restore` does one of a record."""
        assert spec.deployment_id not in self._deployments
        return self._add_and_begin(Deployment(spec, Origin.FILE, self._loader.defaults))

    async def unload(self, deployment_id: str, policy: InFlightPolicy) -> int:
        """Ends a deployment, frees its cores and forgets its record; returns how many requests it ended.

        Raises:
            RequestsInFlight: Policy REFUSE, and a request has not ended.
            StateUnwritable: The deployment has ended, but the next process may load it again.
        """
        deployment = self.get(deployment_id)
        if deployment_id in self._unloads:
            if policy is InFlightPolicy.ABORT:
                _abort_requests(deployment)
        else:
            if deployment.engine is not None and policy is InFlightPolicy.REFUSE and len(deployment.engine.requests):
                raise RequestsInFlight(len(deployment.engine.requests))
            self._begin_unload(deployment, policy, is_final=True)
        return await asyncio.shield(self._unloads[deployment_id])

    async def load_weights(self, deployment: Deployment, load: WeightsLoad) -> WeightsReceipt:
        """Replaces the weights of a deployment; see `weights.load_weights`.

        Raises:
            StateUnwritable: The new weights serve, but a restart would load the old ones.
            KilnError: The load failed; the old weights serve.
        """
        if self._is_shutting_down:
            raise ShuttingDown
        return await load_weights(
            deployment,
            load,
            self.library,
            self.resources,
            save=partial(self._save, deployment),
            on_released=self.on_bundles_changed,
        )

    async def load_adapter(self, deployment: Deployment, load: AdapterLoad) -> AdapterRecord:
        """Lets the requests of a principal name an adapter; see `adapters.load_adapter`.

        Raises:
            KilnError: The load failed; the name means what it meant before.
        """
        if self._is_shutting_down:
            raise ShuttingDown
        found = await prepare_adapter(deployment, load, self.library)

        def save(record: AdapterRecord) -> asyncio.Task[None]:
            return self._begin_write(deployment, partial(self._records.adapters.save, record))

        loading = load_adapter(deployment, found, replace=load.replace, save=save)
        record = await asyncio.shield(begin_task(loading, self._loading_adapters))
        # Another adapter may have lost its name.
        self.on_bundles_changed()
        return record

    async def unload_adapter(self, deployment: Deployment, owner: str, name: str) -> int:
        """Takes the meaning from a principal's name of an adapter; returns how many requests go on with it.

        Raises:
            AdapterNotFound: The principal has loaded no adapter of this name.
            StateUnwritable: The name has no meaning any more, but may have it again after a restart.
        """

        def forget(record: AdapterRecord) -> asyncio.Task[None]:
            return self._begin_write(deployment, partial(self._records.adapters.forget, record.key))

        return await unload_adapter(deployment, owner, name, forget)

    async def shut_down(self, timeout_s: float) -> None:
        """Refuses new requests, waits up to `timeout_s` for running ones, ends the others, then ends every rank.

        The records stay, so the next process loads the deployments again.
        """
        self._is_shutting_down = True
        self._last_digests = self.bundle_digests()
        await self.quarantine.close()
        engines = [deployment.engine for deployment in self.list() if deployment.engine is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await asyncio.gather(*(engine.requests.wait_until_empty() for engine in engines))
        finish = Finish(FinishReason.ERROR, error=ShuttingDown())
        if sum(engine.requests.end_all(lambda _: finish) for engine in engines):
            await asyncio.sleep(FAREWELL_S)
        for deployment in self.list():
            if deployment.deployment_id in self._unloads:
                _abort_requests(deployment)
            else:
                self._begin_unload(deployment, InFlightPolicy.ABORT, is_final=False)
        await asyncio.gather(*self._unloads.values(), *self._loading_adapters, *self._saves, return_exceptions=True)

    def _add_and_begin(self, deployment: Deployment) -> Deployment:
        self._add(deployment)
        try:
            self.quarantine.check(deployment.spec)
        except LoadQuarantined as error:
            self._fail(deployment, error)
        else:
            self._begin(deployment)
        return deployment

    def _add(self, deployment: Deployment) -> None:
        self._deployments[deployment.deployment_id] = deployment
        deployment.on_state_changed = self._tell_states
        self._tell_states()

    def _tell_states(self) -> None:
        self.on_states_changed()

    def _begin(self, deployment: Deployment) -> None:
        # In an empty context: otherwise every log line of the engine would carry the request id of the LoadBundle call.
        name = f"load {deployment.deployment_id}"
        load = asyncio.create_task(self._load(deployment), name=name, context=Context())
        load.add_done_callback(report_failure)
        self._loads[deployment.deployment_id] = load
        self.on_bundles_changed()

    async def _load(self, deployment: Deployment) -> None:
        try:
            if deployment.bundle is None:
                await self._load_with_retries(deployment)
            else:
                # A client waits for it, and may call again.
                await outlast_shortages(partial(self._attempt, deployment), on_shortage=partial(_delay, deployment))
        except KilnError as error:
            _log.warning("load failed", deployment_id=deployment.deployment_id, error=str(error))
            self._fail(deployment, error)
        except Exception:  # noqa: BLE001 - whatever it is, those who watch must learn that the load has ended
            _log.exception("load failed", deployment_id=deployment.deployment_id)
            self._fail(deployment, EngineFailed(deployment.deployment_id))
        finally:
            deployment.progress.close()
            del self._loads[deployment.deployment_id]

    async def _load_with_retries(self, deployment: Deployment) -> None:
        """Loads a declared or recorded deployment, as often as it takes if what ends a load may pass."""
        delays_s, lost_delays_s = (backoff_delays(FIRST_RETRY_S, max_s) for max_s in (MAX_RETRY_S, MAX_LOST_RETRY_S))
        while deployment.engine is None:
            try:
                with naming_shortages():
                    await self._attempt(deployment)
            except RETRIED as error:
                # A pinned bundle that the service no longer has does not come back.
                if not may_pass(error) or (isinstance(error, BundleNotFound) and deployment.digest is not None):
                    raise
                if isinstance(error, NO_ROOM):
                    # Two that wait for room must not keep each other waiting. The next try reserves it anew.
                    self.resources.release(deployment)
                    deployment.bundle = None
                _delay(deployment, error)
                await asyncio.sleep(next(lost_delays_s if isinstance(error, PROCESS_LOST) else delays_s))

    async def _attempt(self, deployment: Deployment) -> None:
        """Loads a deployment once, from where an attempt before it came."""
        async with self.quarantine.recording(deployment.spec):
            if deployment.bundle is None:
                await self._find(deployment)
            await asyncio.shield(self._save(deployment))
            deployment.succeed(await self._loader.load(deployment))

    async def _find(self, deployment: Deployment) -> None:
        """Resolves the bundle of a declared or recorded deployment, and reserves its cores and memory."""
        bundle = await self.library.resolve(deployment.digest or deployment.spec.ref)
        check_bundle(bundle, self.resources)
        weights = bundle
        if deployment.weights is not None and deployment.weights.digest != bundle.digest:
            weights = await self.library.resolve(deployment.weights.digest)
        deployment.find(replace(bundle, ref=deployment.spec.ref))
        self.resources.reserve(deployment, weights.manifest)

    def _save(self, deployment: Deployment) -> asyncio.Task[None]:
        """Begins to record a deployment as it is now."""
        return self._begin_write(deployment, lambda: self._records.deployments.save(deployment.to_record()))

    def _begin_write(self, deployment: Deployment, write: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Begins to write records of a deployment; the task writes nothing once the deployment is gone."""

        async def save() -> None:
            if not deployment.is_gone:
                await write()

        task = begin_task(save(), self._saves)
        self.on_bundles_changed()
        return task

    def _fail(self, deployment: Deployment, error: KilnError) -> None:
        self.resources.release(deployment)
        deployment.fail(error)

    def _begin_unload(self, deployment: Deployment, policy: InFlightPolicy, *, is_final: bool) -> None:
        deployment.begin_unload()
        deployment_id = deployment.deployment_id
        unload = self._unload(deployment, policy, is_final=is_final)
        task = asyncio.create_task(unload, name=f"unload {deployment_id}", context=Context())
        self._unloads[deployment_id] = task
        task.add_done_callback(lambda _: self._unloads.pop(deployment_id))
        task.add_done_callback(report_failure)

    async def _unload(self, deployment: Deployment, policy: InFlightPolicy, *, is_final: bool) -> int:
        load = self._loads.get(deployment.deployment_id)
        if load is not None:
            load.cancel()
            await asyncio.wait([load])
        num_aborted = 0
        if (engine := deployment.engine) is not None:
            if policy is InFlightPolicy.WAIT:
                await engine.requests.wait_until_empty()
            num_aborted = _abort_requests(deployment)
            await deployment.close()
        deployment.progress.close()
        self.resources.release(deployment)
        deployment.is_gone = True
        try:
            if is_final:
                await asyncio.gather(*self._saves, return_exceptions=True)
                await self._records.deployments.forget(deployment.deployment_id)
                await self.quarantine.lift(deployment.deployment_id)
        finally:
            del self._deployments[deployment.deployment_id]
            self.on_bundles_changed()
            self.on_states_changed()
        return num_aborted


def _delay(deployment: Deployment, error: KilnError) -> None:
    _log.warning("load is delayed", deployment_id=deployment.deployment_id, error=str(error))
    deployment.last_error = error


def _abort_requests(deployment: Deployment) -> int:
    engine = deployment.engine
    return 0 if engine is None else engine.requests.end_all(lambda request: aborted(request, "UnloadBundle"))


def _require_same(existing: Deployment, spec: DeploymentSpec, digest: str) -> None:
    """Checks that a deployment is the one that LoadBundle asks for. Options that the call leaves unset match any."""
    holds = existing.digest or "that is looked up"
    # The digest is not compared if the deployment follows an alias: the follower loads what the alias names.
    if existing.digest not in (None, digest) and not (spec.follow_alias and existing.followed_alias == spec.ref):
        raise DeploymentExists(spec.deployment_id, holds)
    if existing.spec.follow_alias != spec.follow_alias:
        raise DeploymentExists(spec.deployment_id, holds, f"follow_alias {existing.spec.follow_alias}")
    if spec.cores and existing.cores and spec.cores != existing.cores:
        raise DeploymentExists(spec.deployment_id, holds, f"cores {', '.join(map(str, existing.cores))}")
    for name in ("threads_per_core", "target_inter_token_latency_s"):
        if getattr(spec, name) not in (None, getattr(existing, name)):
            raise DeploymentExists(spec.deployment_id, holds, f"{name} {getattr(existing, name)}")
    if existing.is_unloading:
        raise DeploymentNotReady(spec.deployment_id, existing.state.name)
