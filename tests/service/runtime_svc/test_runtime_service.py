"""The control plane over loopback, but for loading."""

from __future__ import annotations

import asyncio

from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from targets.cpu import CPU
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import until
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, token_request, tokens_of


async def test_unload_aborts_running_requests_by_default(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 60))
    answer = await served.unload()
    assert answer.aborted_requests == 1
    assert served.ranks.is_closed
    await refused(call, "ABORTED", "REQUEST_ABORTED")
    await refused(served.generate([5]), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")


async def test_unload_may_wait_or_refuse(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 20))
    refuse = served.unload(in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    await refused(refuse, "FAILED_PRECONDITION", "REQUESTS_IN_FLIGHT")
    unload = asyncio.create_task(served.unload(in_flight_policy=pb.IN_FLIGHT_POLICY_WAIT))
    await served.wait_for_state("UNLOADING")
    await refused(served.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    await refused(served.load("story"), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    served.ranks.gate.set()
    assert (await unload).aborted_requests == 0
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20)


async def test_an_impatient_unload_ends_a_patient_one(served: Runtime) -> None:
    await served.deploy()
    await hold(served, token_request([5], 20))
    unload = asyncio.create_task(served.unload(in_flight_policy=pb.IN_FLIGHT_POLICY_WAIT))
    await served.wait_for_state("UNLOADING")
    await served.unload()
    await unload


async def test_unload_ends_a_load(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    load = asyncio.create_task(served.load("story"))
    await until(lambda: served.groups)
    await served.unload()
    await refused(load, "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    assert served.ranks.is_closed
    assert (await served.info()).free_cores == 4


async def test_deployments_are_listed_by_id(served: Runtime) -> None:
    await served.deploy("b")
    await served.deploy("a")
    listed = (await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments
    assert [deployment.id for deployment in listed] == ["a", "b"]
    assert listed[0] == await served.get("a")


async def test_server_tells_what_it_is(served: Runtime) -> None:
    info = await served.info()
    assert (info.schema_revision, info.minimum_client_revision, info.target) == (2, 1, "cpu")
    assert tuple(info.isas) == CPU.isas.list_supported()
    assert info.version
    assert info.start_time.seconds > 1_700_000_000


async def test_reset_that_aborts_gives_a_receipt_of_what_it_ended(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 60))
    scope = pb.DeploymentScope()
    request = pb.ResetKVCacheRequest(deployment_id="d", deployment=scope, in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT)
    reset = asyncio.ensure_future(served.control.ResetKVCache(request))
    await served.wait_for_operation()
    served.ranks.gate.set()
    receipt = await reset
    assert served.ranks.is_zeroed
    assert (receipt.affected_sequences, receipt.freed_slots) == (1, 1)
    assert (receipt.zeroed_bytes, receipt.weight_epoch) == (STATE_BYTES, 1)
    assert receipt.duration.ToNanoseconds() > 0
    caught = await refused(call, "ABORTED", "REQUEST_ABORTED")
    assert caught.metadata["cause"] == "ResetKVCache"


async def test_reset_of_the_prefix_cache_while_a_request_runs(served: Runtime) -> None:
    """Usage counts what a prompt found; salts divide that, and the reset forgets it."""
    flags = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
    deployment = await served.deploy(flags=flags, num_blocks=64, block_tokens=4, serving=Serving(prefix_caching=True))
    assert deployment.capabilities.prefix_caching
    salted = token_request([8] * 10)
    salted.cache_salt = "tenant"

    async def count_cached(request: generation.GenerateRequest) -> int:
        events = await served.ask(request)
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


async def test_reset_while_ranks_restart_is_refused(served: Runtime) -> None:
    await served.deploy()
    served.load_gate.clear()
    served.ranks.die()
    await served.wait_for_state("RECOVERING")
    reset = served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
    await refused(reset, "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    await refused(served.load_weights("story"), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    queued = asyncio.create_task(served.generate([5]))
    await asyncio.sleep(0.05)
    served.load_gate.set()
    assert tokens_of(await queued) == expected_tokens([5], 5), "requests queue meanwhile"
