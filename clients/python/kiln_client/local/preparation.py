"""Makes a model ready on running services: compiles it if the cache lacks it, and loads it unless it is loaded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Final, Protocol, Self

from kiln.bundle.v1.bundle_pb2 import Bundle
from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileRequest, CompileResponse
from kiln.runtime.v1.runtime_pb2 import Deployment, LoadProgress

from kiln_client.compiler import AsyncCompiler, compile_request
from kiln_client.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from kiln_client.local.configuration import Configuration, Given, configure
from kiln_client.local.lookup import Checkpoint, name_of
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord

_POLL_S: Final = 0.1
_AUTO: Final = ".auto"
_SHORT_OF: Final = ("CORES_UNAVAILABLE", "MEMORY_UNAVAILABLE")
_UNDER_WAY: Final = (Deployment.STATE_LOADING, Deployment.STATE_RECOVERING, Deployment.STATE_UNLOADING)


class Progress(Protocol):
    """Shows a person what happens."""

    def configured(self, configuration: Configuration) -> None:
        """Called before the compile."""

    def compiled(self, progress: CompileMetadata) -> None:
        """Called with each progress event of the compile."""

    def lost(self, error: Unavailable) -> None:
        """Called when the connection to the compiler was lost."""

    def unloaded(self, deployment_id: str) -> None:
        """Called when an idle deployment has made room for the load."""

    def loaded(self, progress: LoadProgress) -> None:
        """Called with each progress event of the load."""


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A bundle with a name for its deployment.

    Attributes:
        name: Id of the deployment, unless another bundle has it.
        ref: `NAME:vN`, or the digest.
        digest: Digest of the bundle.
        num_ranks: Processes that compute it.
    """

    name: str
    ref: str
    digest: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """What a compile of a checkpoint is to make: its bundle is called `NAME.auto`, so that NAME goes on to mean the
    checkpoint, as it is when it is asked for.

    Attributes:
        name: Id of the deployment, unless another bundle has it.
        configuration: What to compile.
        request: Asks the compiler for it.
    """

    name: str
    configuration: Configuration
    request: CompileRequest

    @classmethod
    async def plan(
        cls, services: StackRecord, model: Checkpoint, given: Given, *, batch_size: int, suffix: str = ""
    ) -> Self:
        """Configures a checkpoint for this host.

        Args:
            services: The services of the home.
            model: What to compile.
            given: What the person says of the configuration.
            batch_size: Rows of the KV cache, if the person gives none.
            suffix: Behind the names of the bundle and the deployment.
        """
        async with AsyncRuntime(services.runtime, **services.connection) as runtime:
            memory_bytes = (await runtime.get_server_info()).total_memory_bytes
        async with AsyncCompiler(services.compiler, **services.connection) as compiler:
            configuration = await configure(compiler, model, given, batch_size=batch_size, memory_bytes=memory_bytes)
        request = compile_request(
            f"{model.name}{suffix}{_AUTO}", str(model.path), configuration.document, **given.build_options
        )
        return cls(f"{model.name}{suffix}", configuration, request)

    def take(self, response: CompileResponse) -> CompiledModel:
        """Takes what the compiler has made."""
        ref = f"{response.name}:v{response.version}"
        return CompiledModel(self.name, ref, response.digest, self.configuration.num_ranks)


async def compile_model(services: StackRecord, build: ModelBuild, *, progress: Progress) -> CompiledModel:
    """Compiles a checkpoint for this host, or finds the bundle in the cache. Cancelling it cancels the compile.

    Args:
        services: The services of the home.
        build: What to compile.
        progress: Told what happens.
    """
    progress.configured(build.configuration)
    async with AsyncCompiler(services.compiler, **services.connection) as compiler:
        response = await compiler.compile(build.request, on_progress=progress.compiled, on_lost=progress.lost)
    return build.take(response)


def take_bundle(ref: str, bundle: Bundle) -> CompiledModel:
    """Takes a bundle that a person named."""
    name = name_of(bundle.name or bundle.digest.removeprefix("sha256:")[:12])
    return CompiledModel(name, ref, bundle.digest, json.loads(bundle.manifest_json)["tp_degree"])


async def load_model(
    services: StackRecord,
    model: CompiledModel,
    *,
    may_replace: bool,
    progress: Progress,
    deployment_id: str | None = None,
) -> Deployment:
    """Loads a bundle, or finds the deployment that serves it.

    Args:
        services: The services of the home.
        model: What to load.
        may_replace: Whether idle deployments are unloaded: the one of that name if it serves another bundle, and those
            of other checkpoints, the first loaded first, while cores or memory are short.
        progress: Told what happens.
        deployment_id: Id that the deployment must have; None takes the model's name, or one that begins with it.

    Raises:
        AlreadyExists: The deployment of that id serves another bundle, and is not idle.
        ResourceExhausted: The host has too few cores or too little memory, without what could be unloaded.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // model.num_ranks)
    async with AsyncRuntime(services.runtime, **services.connection) as runtime:
        while True:
            place = await _find_place(runtime, model, deployment_id, may_replace=may_replace)
            if isinstance(place, Deployment):
                return place
            try:
                return await runtime.load_bundle(
                    model.ref, place, threads_per_core=threads, on_progress=progress.loaded
                )
            except AlreadyExists:  # another command loads it, too: `_find_place` waits for that one
                continue
            except ResourceExhausted as error:
                if not may_replace or (old := await _find_idle(runtime, error)) is None:
                    raise
                await runtime.unload_bundle(old.id, in_flight="wait")
                progress.unloaded(old.id)


async def _find_place(
    runtime: AsyncRuntime, model: CompiledModel, deployment_id: str | None, *, may_replace: bool
) -> Deployment | str:
    """Finds the deployment that serves a bundle, or else an id that is free, after unloading what is in the way."""
    name = deployment_id or model.name
    deployments: dict[str, Deployment] = {}
    for listed in await runtime.list_deployments():
        deployment = await _settle(runtime, listed) if listed.id == name else listed
        if deployment is not None:
            deployments[deployment.id] = deployment
    for deployment in deployments.values():
        is_right = deployment_id in (None, deployment.id)
        if is_right and deployment.state == Deployment.STATE_READY and _serves(deployment, model.digest):
            return deployment
    old = deployments.get(name)
    if old is not None and (is_idle(old) if may_replace else old.state == Deployment.STATE_FAILED):
        await runtime.unload_bundle(old.id)
        del deployments[old.id]
    if deployment_id in deployments:
        message = f"deployment {name!r} serves another bundle, and is not idle"
        raise AlreadyExists(message, reason="DEPLOYMENT_EXISTS", metadata={"deployment_id": name})
    return deployment_id or next(name for name in _candidates(model.name) if name not in deployments)


async def _find_idle(runtime: AsyncRuntime, shortage: ResourceExhausted) -> Deployment | None:
    """Finds the first loaded of the idle deployments of checkpoints; None if all of them would not help.

    `kiln run` loads such a one again from the cache. What a person loaded from a bundle of theirs stays.
    """
    if shortage.reason not in _SHORT_OF:
        return None
    idle = [one for one in await runtime.list_deployments() if _is_of_checkpoint(one) and is_idle(one)]
    freed_bytes = sum(one.weights_bytes + one.kv_bytes for one in idle)
    if freed_bytes < int(shortage.metadata.get("missing_bytes", 0)):
        return None
    return min(idle, key=lambda one: one.create_time.ToNanoseconds(), default=None)


def _is_of_checkpoint(deployment: Deployment) -> bool:
    return all(role.bundle_ref.rpartition(":")[0].endswith(_AUTO) for role in deployment.roles)


def is_idle(deployment: Deployment) -> bool:
    """Whether a deployment answers no request, and none waits."""
    return not deployment.load.used_slots and not deployment.load.queued_requests


def _serves(deployment: Deployment, digest: str) -> bool:
    """Whether a deployment runs the executables and the weights of one bundle."""
    return all(digest == role.bundle_digest == role.weights_digest for role in deployment.roles)


def _candidates(name: str) -> Iterator[str]:
    return chain((name,), (f"{name}-{number}" for number in count(2)))


async def _settle(runtime: AsyncRuntime, deployment: Deployment) -> Deployment | None:
    """Waits until a deployment is neither being loaded nor being unloaded; returns None if it is gone.

    A runtime loads the deployments of its last life when it starts.
    """
    while deployment.state in _UNDER_WAY:
        await asyncio.sleep(_POLL_S)
        try:
            deployment = await runtime.get_deployment(deployment.id)
        except NotFound:
            return None
    return deployment
