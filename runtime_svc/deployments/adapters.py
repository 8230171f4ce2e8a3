"""Loads adapters into a deployment, and opens those that it had in an earlier process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from bundle.errors import BundleNotFound, FieldViolation, KilnError
from bundle.manifest import BundledAdapter, Manifest, WeightTensor
from bundle.reference import ACCEPTED_ADAPTER_NAME, is_adapter_name
from bundle.store.reader import Bundle
from execution.errors import WeightsInvalid
from runtime_svc.admission.quotes import MAX_QUOTED_CHARS
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.adapter_names import AdapterFiles
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.errors import AdapterMissing, AdapterNotFound, AdaptersUnsupported
from runtime_svc.deployments.names import check_ref
from runtime_svc.deployments.records import AdapterRecord
from runtime_svc.deployments.retries import RETRIED
from runtime_svc.engine.adapters import LoadedAdapter
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.request import Adapter
from runtime_svc.errors import GraphAbiMismatch, RequestInvalid

_log = structlog.get_logger("adapters")


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One load of an adapter for its owner; without a name, it gets the one that it has in its bundle."""

    owner: str
    ref: str
    name: str = ""
    replace: bool = False


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """An adapter whose files are here, and what its name will mean."""

    record: AdapterRecord
    files: AdapterFiles


async def prepare_adapter(deployment: Deployment, load: AdapterLoad, library: BundleLibrary) -> FoundAdapter:
    """Finds the adapter of a bundle, and checks that it can be loaded under its name.

    Raises:
        AdaptersUnsupported, AdapterMissing, GraphAbiMismatch, WeightsInvalid: Deployment and bundle do not fit.
        AdapterExists, TooManyAdapters: See `AdapterNames.require_room`.
        KilnError: The bundle cannot be found, fetched or verified.
    """
    check_ref(load.ref)
    if load.name:
        _check_name(load.name)
    engine = deployment.require_loaded().engine
    assert deployment.bundle is not None
    if not deployment.bundle.manifest.num_adapter_slots:
        raise AdaptersUnsupported(deployment.deployment_id)
    resolved = await library.resolve(load.ref)
    adapter = _find_fitting(deployment, resolved)
    record = AdapterRecord(
        deployment_id=deployment.deployment_id,
        owner=load.owner,
        name=load.name or adapter.name,
        digest=adapter.digest,
        ref=load.ref,
        bundle_digest=resolved.digest,
    )
    _check_name(record.name)
    deployment.adapters.require_room(record, replace=load.replace)
    files = AdapterFiles.of(adapter, await _fetch(library, resolved))
    await engine.check_adapter(files.paths_by_rank)
    return FoundAdapter(record, files)


async def load_adapter(
    deployment: Deployment, found: FoundAdapter, *, replace: bool, save: Callable[[AdapterRecord], Awaitable[None]]
) -> AdapterRecord:
    """Makes a name of a principal mean an adapter, once `save` has recorded that; returns what the name means then.

    If the name means the adapter already, only the files are others from then on. After an error it means what it meant
    before.

    Raises:
        AdapterExists, TooManyAdapters: Others have loaded adapters since `prepare_adapter`.
        KilnError: `save` failed, or the deployment serves no more.
    """
    names, record = deployment.adapters, found.record
    async with deployment.adapters_lock:
        engine = deployment.require_loaded().engine
        names.require_room(record, replace=replace)
        meant = engine.find_adapter(record.key)
        # A name whose adapter is lost, or not opened since a restart, has a record, and means none.
        if meant is None or meant.digest != record.digest:
            await save(record)
            names.add(record)
        _enter(deployment, engine, found)
        assert record.owner is not None
        return names.find_own(record.owner, record.name) or record


def describe_adapter(deployment: Deployment, record: AdapterRecord) -> LoadedAdapter | None:
    """Says where the adapter of a name is, and how many use it; None if the engine does not have it."""
    return None if deployment.engine is None else deployment.engine.describe_adapter(record.key)


async def unload_adapter(
    deployment: Deployment, owner: str, name: str, forget: Callable[[AdapterRecord], Awaitable[None]]
) -> int:
    """Takes the meaning from a principal's name, and has `forget` remove its record.

    Returns how many requests go on with its adapter.

    Raises:
        AdapterNotFound: The principal has loaded no adapter of this name.
        KilnError: `forget` failed.
    """
    async with deployment.adapters_lock:
        record = deployment.adapters.find_own(owner, name)
        if record is None:
            accepted = deployment.adapters.list_accepted(owner, only_own=True)
            raise AdapterNotFound(deployment.deployment_id, "name", name[:MAX_QUOTED_CHARS], accepted)
        loaded = describe_adapter(deployment, record)
        deployment.adapters.remove(record)
        if deployment.engine is not None:
            deployment.engine.unload_adapter(record.key)
            _forget_unused_files(deployment, deployment.engine)
        await asyncio.shield(forget(record))
        return 0 if loaded is None else loaded.num_users


def find_changed_adapters(deployment: Deployment, engine: Engine) -> list[tuple[str, str]]:
    """Returns the digests of adapters that a file has been written of since it was verified, and the file's digest.

    Those of the deployment's own bundle are not among them, see `GroupLauncher.find_changed`.
    """
    changed = []
    for digest, known in list(deployment.adapter_files.items()):
        if known.bundle_digest != deployment.digest and engine.scheduler.adapters.is_loaded(digest):
            blob = known.files.find_changed()
            if blob is not None:
                changed.append((digest, blob))
    return changed


def lose_adapter(deployment: Deployment, engine: Engine, digest: str, cause: str) -> None:
    """Ends the requests of an adapter whose files are not what they were; its names mean none until it is loaded."""
    for record in deployment.adapters.list_owned():
        if record.digest == digest:
            engine.unload_adapter(record.key)
            _log_loss(deployment, record, cause)
    engine.requests.end_adapter(digest, cause)
    _forget_unused_files(deployment, engine)


async def open_adapter(deployment: Deployment, library: BundleLibrary, caller: str, name: str) -> None:
    """Gives the engine the adapter that a caller's request names, if it is of an earlier process and not opened yet.

    The ranks have checked its files when it was loaded, and do so when they write a slot. If its bundle is gone or
    damaged, its name means no adapter until it is loaded again.

    Raises:
        KilnError: Its bundle cannot be had now; the next request tries again.
    """
    unopened, record = deployment.adapters.unopened, deployment.adapters.find(caller, name)
    if record is None or (lock := unopened.get(record.key)) is None:
        return
    async with lock:
        found = None
        if unopened.get(record.key) is lock:
            try:
                resolved = await library.resolve(record.bundle_digest)
                adapter = _find_fitting(deployment, resolved)
                found = FoundAdapter(record, AdapterFiles.of(adapter, await _fetch(library, resolved)))
            except KilnError as error:
                if isinstance(error, RETRIED) and not isinstance(error, BundleNotFound):
                    raise
                _log_loss(deployment, record, str(error))
        # Another load of the name, or its unload, may have come first.
        if unopened.get(record.key) is lock:
            del unopened[record.key]
            if found is not None and deployment.engine is not None:
                _enter(deployment, deployment.engine, found)


async def enter_adapters(deployment: Deployment, engine: Engine, bundle: Bundle) -> None:
    """Loads the adapters of a deployment's own bundle into a new engine.

    Raises:
        WeightsInvalid: A file of the bundle does not fit the ranks.
    """
    # An attempt before this one may have left some.
    deployment.adapter_files.clear()
    for adapter in bundle.manifest.adapters:
        record = AdapterRecord(
            deployment_id=deployment.deployment_id,
            owner=None,
            name=adapter.name,
            digest=adapter.digest,
            bundle_digest=bundle.digest,
        )
        files = AdapterFiles.of(adapter, bundle)
        await engine.check_adapter(files.paths_by_rank)
        deployment.adapters.add(record)
        _enter(deployment, engine, FoundAdapter(record, files))


def _enter(deployment: Deployment, engine: Engine, found: FoundAdapter) -> None:
    record = found.record
    known = deployment.adapter_files.get(record.digest)
    # The deployment's own bundle is verified whenever ranks start, and its adapters stay loaded.
    files = found.files if known is None or known.bundle_digest != deployment.digest else known
    deployment.adapter_files[record.digest] = files
    replaced = engine.find_adapter(record.key)
    engine.load_adapter(record.key, Adapter(record.name, record.digest), files.paths_by_rank)
    if replaced is not None:
        _forget_unused_files(deployment, engine)


def _forget_unused_files(deployment: Deployment, engine: Engine) -> None:
    is_loaded, known = engine.scheduler.adapters.is_loaded, deployment.adapter_files
    deployment.adapter_files = {digest: files for digest, files in known.items() if is_loaded(digest)}


async def _fetch(library: BundleLibrary, resolved: ResolvedBundle) -> Bundle:
    bundle = await library.fetch(resolved, lambda *_: None)
    await library.verify(bundle)
    return bundle


def _find_fitting(deployment: Deployment, offered: ResolvedBundle) -> BundledAdapter:
    """Returns the adapter of a bundle that has one and nothing else, if it fits the slots of a deployment."""
    manifest = offered.manifest
    if manifest.has_executables or manifest.weight_sets:
        raise AdapterMissing(offered.ref, "executables or weights")
    if len(manifest.adapters) != 1:
        raise AdapterMissing(offered.ref, f"{len(manifest.adapters)} adapters")
    assert deployment.bundle is not None
    _compare(deployment.bundle.manifest, manifest, manifest.adapters[0])
    return manifest.adapters[0]


def _compare(serving: Manifest, offered: Manifest, adapter: BundledAdapter) -> None:
    """Checks that the ranks of executables can write an adapter into their slots."""
    if serving.graph_abi_digest != offered.graph_abi_digest:
        raise GraphAbiMismatch(serving.graph_abi_digest, offered.graph_abi_digest)
    shards = {shard.rank: shard for shard in adapter.shards}
    for slot in serving.shards(mutable=True):
        accepted = {tensor.name: tensor for tensor in slot.entry().tensors}
        given = {tensor.name: tensor for tensor in shards[slot.rank].tensors} if slot.rank in shards else {}
        violations = [
            FieldViolation(f"tensors[{name}]", _describe(given.get(name)), _describe(accepted.get(name)))
            for name in sorted(accepted.keys() | given.keys())
            if accepted.get(name) != given.get(name)
        ]
        if violations:
            detail = f"{len(violations)} tensors differ from those of a slot, the first: {violations[0]}"
            raise WeightsInvalid(slot.rank, detail, violations)


def _describe(tensor: WeightTensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _check_name(name: str) -> None:
    if not is_adapter_name(name):
        raise RequestInvalid([FieldViolation("name", repr(name[:MAX_QUOTED_CHARS]), ACCEPTED_ADAPTER_NAME)])


def _log_loss(deployment: Deployment, record: AdapterRecord, error: str) -> None:
    _log.error(
        "an adapter is lost until it is loaded again",
        deployment_id=deployment.deployment_id,
        adapter=record.name,
        owner=record.owner,
        bundle=record.bundle_digest,
        error=error,
    )
