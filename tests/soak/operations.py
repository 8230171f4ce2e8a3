"""What operators do under a soak, by calls of the control plane: one row for each operation and policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple

from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from tests.soak.site import END_TIMEOUT_S, LASTING, SHARING, Site
from tests.soak.windows import ABORTED

NONE: Final = frozenset[str]()
LOADING: Final = "LOAD_IN_PROGRESS"
#: Deployments that come and go at once.
MAX_PASSING: Final = 1
PASSING_REF: Final = "story-1"
#: What LoadWeights takes.
WEIGHT_POLICIES: Final = (
    *((policy, kv) for policy in ("WAIT", "ABORT", "REFUSE") for kv in ("INVALIDATE", "KEEP")),
    ("CONTINUE", "KEEP"),
)
POLICIES: Final = ("WAIT", "ABORT", "REFUSE")
HOSTILE_DEPLOYMENT: Final = "hostile"


class Operation(NamedTuple):
    """Calls, how often they are made, in proportion, and reasons with which streams may end meanwhile."""

    name: str
    weight: int
    act: Callable[[Site, str, random.Random], Awaitable[None]]
    streams: frozenset[str] = NONE


async def drain(call: Any) -> None:
    async for _ in call:
        pass


def number_of(policy: str) -> pb.InFlightPolicy.ValueType:
    return pb.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{policy}")


async def load_weights(site: Site, name: str, choose: random.Random, *, policy: str, kv: str) -> None:
    """Swaps between the weight sets that a lasting deployment may have."""
    request = choose_weights(choose)
    request.in_flight_policy = number_of(policy)
    request.kv_policy = pb.KvPolicy.Value(f"KV_POLICY_{kv}")
    await site.call(name, swap(site, request), refusals_of(policy))
    await site.get(request.deployment_id)


async def leave_load_weights(site: Site, name: str, choose: random.Random) -> None:
    """The client leaves, and the swap happens or does not; the next one waits for it and tells."""
    left, request = choose_weights(choose), choose_weights(choose)
    epoch = (await site.get(left.deployment_id)).roles[0].weight_epoch
    call = swap(site, left, timeout_s=choose.uniform(0.01, 0.3))
    await site.call(name, call, frozenset({"DEADLINE_EXCEEDED"}))
    end = LOADING
    while LOADING in end:
        await asyncio.sleep(0.05)
        again = swap(site, request, since=(epoch, left))
        end = await site.call(name, again, frozenset({LOADING}), is_counted=False)
    await site.get(request.deployment_id)


def choose_weights(choose: random.Random) -> pb.LoadWeightsRequest:
    """A lasting deployment that has several weight sets, and one of them."""
    deployment_id = choose.choice([one for one, refs in LASTING.items() if len(refs) > 1])
    return pb.LoadWeightsRequest(deployment_id=deployment_id, ref=choose.choice(LASTING[deployment_id]))


async def swap(
    site: Site,
    request: pb.LoadWeightsRequest,
    *,
    timeout_s: float | None = None,
    since: tuple[int, pb.LoadWeightsRequest] | None = None,
) -> None:
    """Calls LoadWeights, and notes the weights of the epoch that it begins.

    Args:
        timeout_s: When the client leaves.
        since: An epoch, and a load whose client left in it. If one epoch has come in between, that load began it.
    """
    async for event in site.control.LoadWeights(request, timeout=timeout_s):
        if event.HasField("result"):
            site.note_weights(event.result.deployment)
            if since is not None and event.result.previous_weight_epoch == since[0] + 1:
                site.references.note_epoch(request.deployment_id, since[0] + 1, site.digests[since[1].ref])


def refusals_of(policy: str) -> frozenset[str]:
    return frozenset({"REQUESTS_IN_FLIGHT"}) if policy == "REFUSE" else NONE


async def reset(site: Site, name: str, choose: random.Random, *, policy: str) -> None:
    """Forgets the KV cache of a lasting deployment."""
    request = pb.ResetKVCacheRequest(deployment_id=choose.choice(list(LASTING)), in_flight_policy=number_of(policy))
    await site.call(name, site.control.ResetKVCache(request), refusals_of(policy))


async def reset_session(site: Site, name: str, choose: random.Random) -> None:
    """Lists the sessions of a lasting deployment, and forgets one of them, which a request may use or end meanwhile."""
    deployment_id = choose.choice(list(LASTING))
    listed = await site.control.ListSessions(pb.ListSessionsRequest(deployment_id=deployment_id), timeout=END_TIMEOUT_S)
    if listed.sessions:
        scope = pb.SessionScope(session_id=choose.choice(listed.sessions).id)
        request = pb.ResetKVCacheRequest(deployment_id=deployment_id, session=scope)
        await site.call(name, site.control.ResetKVCache(request), frozenset({"SESSION_BUSY", "SESSION_NOT_FOUND"}))


async def reset_prefix_cache(site: Site, name: str, _choose: random.Random) -> None:
    request = pb.ResetKVCacheRequest(deployment_id=SHARING, prefix_cache=pb.PrefixCacheScope())
    await site.call(name, site.control.ResetKVCache(request), NONE)


async def load(site: Site, name: str, choose: random.Random, *, leaves: bool = False) -> None:
    """Loads a deployment that passes, unless there are enough. If its client leaves, it is unloaded wherever it is."""
    if len(site.passing) >= MAX_PASSING:
        return
    deployment_id = f"passing-{choose.getrandbits(32):08x}"
    request = pb.LoadBundleRequest(ref=PASSING_REF, deployment_id=deployment_id)
    call = site.control.LoadBundle(request, timeout=choose.uniform(0.01, 0.5) if leaves else None)
    end = await site.call(name, drain(call), frozenset({"DEADLINE_EXCEEDED"}) if leaves else NONE)
    if end == "OK" and not leaves:
        await site.get(deployment_id)
        site.passing.append(deployment_id)
    else:
        await unload_at_last(site, deployment_id)


async def unload(site: Site, name: str, _choose: random.Random, *, policy: str) -> None:
    """Unloads the deployment that passes, if there is one."""
    for deployment_id in [*site.passing]:
        request = pb.UnloadBundleRequest(deployment_id=deployment_id, in_flight_policy=number_of(policy))
        end = await site.call(name, site.control.UnloadBundle(request), refusals_of(policy))
        if "REQUESTS_IN_FLIGHT" not in end:
            site.passing.remove(deployment_id)
            await unload_at_last(site, deployment_id)


async def unload_at_last(site: Site, deployment_id: str) -> None:
    """Unloads a deployment, if it is there in any state."""
    request = pb.UnloadBundleRequest(deployment_id=deployment_id)
    reasons = frozenset({"DEPLOYMENT_NOT_FOUND", "STATE_UNWRITABLE"})
    await site.call("unload at last", site.control.UnloadBundle(request), reasons, is_counted=False)


async def serve_hostile_template(site: Site, name: str, choose: random.Random) -> None:
    """Loads a bundle whose chat template computes without end, and chats with it while others are served.

    The load may be refused, and so may a chat; a text prompt of the same deployment may not.
    """
    ref = choose.choice(site.services.hostile_refs)
    request = pb.LoadBundleRequest(ref=ref, deployment_id=HOSTILE_DEPLOYMENT)
    refusals = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION"})
    try:
        if await site.call(name, drain(site.control.LoadBundle(request)), refusals) != "OK":
            return
        message = generation.ChatMessage(role="user", content="x")
        chat = generation.GenerateRequest(
            deployment_id=HOSTILE_DEPLOYMENT, chat=generation.Chat(messages=[message] * choose.randint(1, 4))
        )
        plain = generation.GenerateRequest(deployment_id=HOSTILE_DEPLOYMENT, text="Once")
        for one, reasons in ((chat, refusals), (plain, NONE)):
            one.stop.max_new_tokens = 4
            await site.call(name, drain(site.generation.Generate(one)), reasons)
    finally:
        await unload_at_last(site, HOSTILE_DEPLOYMENT)


def _aborting(policy: str) -> frozenset[str]:
    return ABORTED if policy == "ABORT" else NONE


OPERATIONS: Final = (
    *(
        Operation(f"load weights, {policy} {kv}", 2, partial(load_weights, policy=policy, kv=kv), _aborting(policy))
        for policy, kv in WEIGHT_POLICIES
    ),
    Operation("load weights and leave", 2, leave_load_weights),
    *(Operation(f"reset, {policy}", 2, partial(reset, policy=policy), _aborting(policy)) for policy in POLICIES),
    Operation("reset a session", 4, reset_session),
    Operation("reset the prefix cache", 2, reset_prefix_cache),
    Operation("load a bundle", 5, load),
    Operation("load a bundle and leave", 2, partial(load, leaves=True)),
    *(Operation(f"unload, {policy}", 2, partial(unload, policy=policy)) for policy in POLICIES),
    Operation("serve a hostile template", 3, serve_hostile_template),
)


async def perform(site: Site, operation: Operation, choose: random.Random) -> None:
    with site.windows.open(operation.name, operation.streams, frozenset()):
        await operation.act(site, operation.name, choose)
