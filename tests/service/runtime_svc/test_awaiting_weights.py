"""Bundles that come in two parts: executables that wait for weights, and weights for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from execution.errors import StepFailed
from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of


async def deploy_empty(served: Runtime) -> pb.Deployment:
    served.publish("empty", has_weights=False)
    served.publish("weights", has_executables=False, bias=31)
    return (await served.load("empty"))[-1].deployment


async def test_executables_wait_for_weights(served: Runtime) -> None:
    deployment = await deploy_empty(served)
    assert deployment.state == pb.Deployment.STATE_AWAITING_WEIGHTS
    role = deployment.roles[0]
    assert (role.weight_epoch, role.weights_ref, role.weights_digest) == (0, "", "")
    assert not served.ranks.is_warm
    caught = await refused(served.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    assert caught.metadata["state"] == "AWAITING_WEIGHTS"
    assert "LoadWeights" in caught.message
    for call in (
        served.generation.Tokenize(generation.TokenizeRequest(deployment_id="d", text="hi")),
        served.generation.Detokenize(generation.DetokenizeRequest(deployment_id="d", token_ids=[5])),
        served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d")),
    ):
        await refused(call, "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    assert (await served.load("empty"))[-1].deployment.state == pb.Deployment.STATE_AWAITING_WEIGHTS
    result = (await served.load_weights("weights"))[-1].result
    assert (result.previous_weight_epoch, result.weight_epoch) == (0, 1)
    assert result.deployment.state == pb.Deployment.STATE_READY
    assert served.ranks.is_warm
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)


async def test_bundles_that_lack_a_part_are_named(served: Runtime) -> None:
    await deploy_empty(served)
    caught = await refused(served.load_weights("empty"), "FAILED_PRECONDITION", "WEIGHTS_MISSING")
    assert caught.metadata["ref"] == "empty"
    caught = await refused(served.load("weights", "other"), "FAILED_PRECONDITION", "EXECUTABLES_MISSING")
    assert caught.metadata["ref"] == "weights"
    assert (await served.info()).free_cores == 3
    served.publish("wide", has_executables=False, graph_abi_digest="sha256:" + "1" * 64)
    await refused(served.load_weights("wide"), "FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH")
    assert (await served.get()).state == pb.Deployment.STATE_AWAITING_WEIGHTS


async def test_ranks_that_die_waiting_are_replaced_and_no_request_queues_meanwhile(served: Runtime) -> None:
    await deploy_empty(served)
    served.load_gate.clear()
    served.ranks.die()
    await served.wait_for_state("RECOVERING")
    await refused(served.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    served.load_gate.set()
    assert (await served.wait_for_state("AWAITING_WEIGHTS")).roles[0].weight_epoch == 0
    await served.load_weights("weights")
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)


async def test_waiting_outlives_a_restart(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await deploy_empty(first)
        names = dict(first.bundles.names)
    async with serve_runtime(tmp_path, prepare=lambda bundles: bundles.names.update(names)) as second:
        await second.wait_for_state("AWAITING_WEIGHTS")
        await second.load_weights("weights")
    async with serve_runtime(tmp_path) as third:
        role = (await third.wait_for_state("READY")).roles[0]
        assert (role.weights_ref, role.weight_epoch) == ("weights", 1)
        assert tokens_of(await third.generate([5])) == expected_tokens([5], 5, bias=31)


async def test_swap_that_reached_some_ranks_only_restarts_them_all(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    served.ranks.swap_failures = [StepFailed("swap", "out of memory")]
    await refused(served.load_weights("pirate"), "INTERNAL", "STEP_FAILED")
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert len(served.groups) == 2
    assert (await served.get()).roles[0].weight_epoch == 1
    assert (await served.load_weights("pirate"))[-1].result.weight_epoch == 2
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)


async def test_unload_ends_a_weight_load(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    served.ranks.swap_gate.clear()
    load = asyncio.create_task(served.load_weights("pirate"))
    await asyncio.wait_for(served.ranks.swapping.wait(), HANG_S)
    await served.unload()
    await refused(asyncio.wait_for(load, HANG_S), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
    assert (await served.info()).free_memory_bytes == (await served.info()).total_memory_bytes
