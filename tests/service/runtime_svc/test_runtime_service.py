"""The control plane over loopback, but for loading."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from targets.cpu import CPU
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import HANG_S
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.runtime import Runtime, details_of, fields_of, hold, raises, token_request, tokens_of

# --- UnloadBundle -----------------------------------------------------------------------------------------------------


async def test_unload_aborts_running_requests_by_default(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 60))
    answer = await served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d"))
    assert answer.aborted_requests == 1
    assert served.ranks.is_closed
    async with raises("ABORTED", "REQUEST_ABORTED"):
        async for _ in call:
            pass
    async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
        await served.generate([5])


async def test_unload_may_wait_or_refuse(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 20))
    refuse = pb.UnloadBundleRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    async with raises("FAILED_PRECONDITION", "REQUESTS_IN_FLIGHT"):
        await served.control.UnloadBundle(refuse)
    wait = pb.UnloadBundleRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_WAIT)
    unload = asyncio.ensure_future(served.control.UnloadBundle(wait))
    await served.wait_for_state("UNLOADING")
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.generate([5])
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.load("story")
    served.ranks.gate.set()
    assert (await unload).aborted_requests == 0
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20)


async def test_impatient_unload_ends_a_patient_one(served: Runtime) -> None:
    await served.deploy()
    await hold(served, token_request([5], 20))
    wait = pb.UnloadBundleRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_WAIT)
    unload = asyncio.ensure_future(served.control.UnloadBundle(wait))
    await served.wait_for_state("UNLOADING")
    await served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d"))
    await unload


async def test_unload_ends_a_load(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    load = asyncio.create_task(served.load("story"))
    async with asyncio.timeout(HANG_S):
        while not served.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d"))
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await load
    assert served.ranks.is_closed
    assert (await served.control.GetServerInfo(pb.GetServerInfoRequest())).free_cores == 4


# --- lists and unknowns -----------------------------------------------------------------------------------------------


async def test_deployments_are_listed_by_id(served: Runtime) -> None:
    await served.deploy("b")
    await served.deploy("a")
    listed = (await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments
    assert [deployment.id for deployment in listed] == ["a", "b"]
    assert listed[0] == await served.get("a")


async def test_server_tells_what_it_is(served: Runtime) -> None:
    info = await served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.schema_revision, info.minimum_client_revision, info.target) == (2, 1, "cpu")
    assert tuple(info.isas) == CPU.isas.list_supported()
    assert info.version
    assert info.start_time.seconds > 1_700_000_000


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetDeployment", pb.GetDeploymentRequest(deployment_id="nobody")),
        ("UnloadBundle", pb.UnloadBundleRequest(deployment_id="nobody")),
        ("ResetKVCache", pb.ResetKVCacheRequest(deployment_id="nobody")),
    ],
)
async def test_unknown_deployment(served: Runtime, method: str, request_: Message) -> None:
    async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
        await getattr(served.control, method)(request_)


# --- ResetKVCache -----------------------------------------------------------------------------------------------------


async def test_reset_gives_a_receipt(served: Runtime) -> None:
    await served.deploy()
    await served.generate([5])
    assert not served.ranks.is_zeroed
    receipt = await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
    assert served.ranks.is_zeroed
    assert (receipt.affected_sequences, receipt.freed_slots, receipt.zeroed_bytes, receipt.weight_epoch) == (
        0,
        0,
        STATE_BYTES,
        1,
    )
    assert receipt.duration.ToNanoseconds() > 0


async def test_reset_that_aborts_counts_what_it_ended(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 60))
    request = pb.ResetKVCacheRequest(
        deployment_id="d", deployment=pb.DeploymentScope(), in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT
    )
    reset = asyncio.ensure_future(served.control.ResetKVCache(request))
    await served.wait_for_operation()
    served.ranks.gate.set()
    receipt = await reset
    assert (receipt.affected_sequences, receipt.freed_slots) == (1, 1)
    async with raises("ABORTED", "REQUEST_ABORTED") as caught:
        async for _ in call:
            pass
    assert details_of(caught[0])[0].metadata["cause"] == "ResetKVCache"


async def test_reset_of_the_prefix_cache_while_a_request_runs(served: Runtime) -> None:
    """Usage counts what a prompt found; salts divide that, and the reset forgets it."""
    flags = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
    deployment = await served.deploy(flags=flags, num_blocks=64, block_tokens=4, serving=Serving(prefix_caching=True))
    assert deployment.capabilities.prefix_caching
    salted = token_request([8] * 10)
    salted.cache_salt = "tenant"

    async def count_cached(request: generation.GenerateRequest) -> int:
        events = [event async for event in served.generation.Generate(request)]
        assert tokens_of(events) == expected_tokens([8] * 10, 5)
        return int(events[-1].finished.usage.cached_prompt_tokens)

    assert [await count_cached(one) for one in (token_request([8] * 10), salted, salted)] == [0, 0, 8]
    call = await hold(served, token_request([5] * 6, 20))
    request = pb.ResetKVCacheRequest(deployment_id="d", prefix_cache=pb.PrefixCacheScope())
    reset = asyncio.ensure_future(served.control.ResetKVCache(request))
    await served.wait_for_operation()
    served.ranks.gate.set()
    receipt = await reset
    assert (receipt.affected_sequences, receipt.freed_slots, receipt.zeroed_bytes) == (0, 0, STATE_BYTES)
    assert tokens_of([event async for event in call]) == expected_tokens([5] * 6, 20)
    assert await count_cached(salted) == 0


async def test_reset_of_a_prefix_cache_that_there_is_not(served: Runtime) -> None:
    await served.deploy()
    request = pb.ResetKVCacheRequest(deployment_id="d", prefix_cache=pb.PrefixCacheScope())
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.control.ResetKVCache(request)
    assert "is_prefix_caching" in caught[0].details()


async def test_reset_of_the_prefix_cache_takes_no_policy(served: Runtime) -> None:
    await served.deploy(
        flags=(*DYNAMIC_FLAGS, COMPUTED_CONTEXT), num_blocks=64, block_tokens=4, serving=Serving(prefix_caching=True)
    )
    request = pb.ResetKVCacheRequest(
        deployment_id="d", prefix_cache=pb.PrefixCacheScope(), in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT
    )
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.control.ResetKVCache(request)
    assert "running requests go on" in caught[0].details()


async def test_reset_that_refuses(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 20))
    request = pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    reset = asyncio.ensure_future(served.control.ResetKVCache(request))
    await served.wait_for_operation()
    served.ranks.gate.set()
    async with raises("FAILED_PRECONDITION", "REQUESTS_IN_FLIGHT"):
        await reset
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20)


async def test_scope_of_a_later_api_forgets_nothing(served: Runtime) -> None:
    await served.deploy()
    await served.generate([5])
    # Field 9, a message: as if a later API had put a session there.
    request = pb.ResetKVCacheRequest.FromString(pb.ResetKVCacheRequest(deployment_id="d").SerializeToString() + b"J\0")
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.control.ResetKVCache(request)
    assert fields_of(caught[0]) == ["scope"]
    assert not served.ranks.is_zeroed


@pytest.mark.parametrize("policy", [pb.IN_FLIGHT_POLICY_CONTINUE, 77])
async def test_policies_that_a_method_does_not_have(served: Runtime, policy: Any) -> None:
    await served.deploy()
    for call in (
        served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=policy)),
        served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d", in_flight_policy=policy)),
        served.load_weights("story", in_flight_policy=policy),
    ):
        async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
            await call
        assert fields_of(caught[0]) == ["in_flight_policy"]


async def test_reset_while_ranks_restart_is_refused(served: Runtime) -> None:
    await served.deploy()
    served.load_gate.clear()
    served.ranks.die()
    await served.wait_for_state("RECOVERING")
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.load_weights("story")
    queued = asyncio.create_task(served.generate([5]))
    await asyncio.sleep(0.05)
    served.load_gate.set()
    assert tokens_of(await queued) == expected_tokens([5], 5), "requests queue meanwhile"
