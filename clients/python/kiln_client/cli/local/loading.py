"""Loads a bundle, or finds the deployment that serves it; unloads what is idle and in the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Final

from kiln.runtime.v1.runtime_pb2 import Deployment

from kiln_client.cli.progress import ProgressView
from kiln_client.errors import AlreadyExists, NotFound, ResourceExhausted
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord

#: Behind the name of a checkpoint, in the name of the bundle that is made of it.
AUTO: Final = ".auto"

_POLL_S: Final = 0.1
_SHORT_OF: Final = ("CORES_UNAVAILABLE", "MEMORY_UNAVAILABLE")
_UNDER_WAY: Final = (Deployment.STATE_LOADING, Deployment.STATE_RECOVERING, Deployment.STATE_UNLOADING)


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A bundle, and the id of its deployment unless another bundle has that. `ref` is `NAME:vN`, or the digest."""

    name: str
    ref: str
    digest: str
    num_ranks: int


async def load_model(
    services: StackRecord,
    model: CompiledModel,
    view: ProgressView,
    *,
    may_replace: bool,
    deployment_id: str | None = None,
) -> Deployment:
    """Loads a bundle on the services of a home, or finds the deployment that serves it.

    Args:
        may_replace: Whether idle deployments are unloaded: the one of that name if it serves another bundle, and those
            of other checkpoints, the first loaded first, while cores or memory are short.
        deployment_id: Id that the deployment must have; None takes the model's name, or one that begins with it.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // model.num_ranks)
    async with AsyncRuntime(services.runtime, **services.connection) as runtime:
        while True:
            place = await _find_place(runtime, model, deployment_id, may_replace=may_replace)
            if isinstance(place, Deployment):
                return place
            try:
                return await runtime.load_bundle(model.ref, place, threads_per_core=threads, on_progress=view.loaded)
            except AlreadyExists:  # another command loads it, too: `_find_place` waits for that one
                continue
            except ResourceExhausted as error:
                if not may_replace or (old := await _find_idle(runtime, error)) is None:
                    raise
                await runtime.unload_bundle(old.id, in_flight="wait")
                view.unloaded(old.id)


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
    return all(role.bundle_ref.rpartition(":")[0].endswith(AUTO) for role in deployment.roles)


def is_idle(deployment: Deployment) -> bool:
    """Whether a deployment answers no request, and none waits."""
    return not deployment.load.used_slots and not deployment.load.queued_requests


def _serves(deployment: Deployment, digest: str) -> bool:
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
