"""Old weights that stay mapped, over loopback: for requests that run, and for a way back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.store.reader import open_bundle
from runtime_svc.deployments.memory import state_need
from tests.hang_guard import until
from tests.ranks.fakes import expected_tokens, make_manifest
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, serve_runtime, stages_of, token_request, tokens_of

FINISH = pb.IN_FLIGHT_POLICY_FINISH_ON_OLD
CONTINUE = pb.IN_FLIGHT_POLICY_CONTINUE


async def deploy(served: Runtime) -> str:
    """A deployment of `story`, with `pirate` beside it; returns the digest of the first."""
    served.publish("pirate", bias=31)
    return (await served.deploy()).roles[0].bundle_digest


async def swap_under(served: Runtime, ref: str, **options: Any) -> Any:
    """Loads weights under a request that `hold` has begun, which then goes on."""
    load = asyncio.create_task(served.load_weights(ref, in_flight_policy=FINISH, **options))
    await served.wait_for_operation()
    served.ranks.gate.set()
    return (await load)[-1].result


async def test_running_requests_end_with_the_old_weights(served: Runtime) -> None:
    story = await deploy(served)
    served.ranks.step_s = 0.01
    call = await hold(served, token_request([5], 40))
    result = await swap_under(served, "pirate")
    assert (result.previous_weight_epoch, result.weight_epoch, result.aborted_requests) == (1, 2, 0)
    old = result.deployment.old_weights
    assert (old.ref, old.digest, old.weight_epoch, old.active_requests, old.kept) == ("story", story, 1, 1, False)
    new = await served.generate([6])
    assert tokens_of(new) == expected_tokens([6], 5, bias=31)
    assert {event.weight_epoch for event in new} == {2}
    served.publish("third", bias=7)
    caught = await refused(served.load_weights("third"), "FAILED_PRECONDITION", "OLD_WEIGHTS_IN_USE")
    assert caught.metadata == {"num_requests": "1", "weight_epoch": "1"}
    events = [event async for event in call]
    assert tokens_of(events) == expected_tokens([5], 40)
    assert {event.weight_epoch for event in events} == {1}
    await served.wait_for(lambda one: not one.HasField("old_weights"))
    assert (await served.load_weights("third"))[-1].result.weight_epoch == 3


async def test_a_way_back_reads_no_file(served: Runtime) -> None:
    story = await deploy(served)
    result = (await served.load_weights("pirate", keep_old_weights=True))[-1].result
    assert (result.deployment.old_weights.digest, result.deployment.old_weights.kept) == (story, True)
    bundle = open_bundle(served.store, story)
    weights = bundle.blob_path(str(bundle.manifest.weight_sets[0].shards[0].blob))
    weights.unlink()
    call = await hold(served, token_request([5], 20))
    load = asyncio.create_task(served.load_weights(story, in_flight_policy=FINISH, keep_old_weights=True))
    await served.wait_for_operation()
    served.ranks.gate.set()
    events = await load
    assert stages_of(events) == ["STAGE_RESOLVE", "STAGE_SWAP"]
    role = events[-1].result.deployment.roles[0]
    assert (role.weights_ref, role.weights_digest, role.weight_epoch) == (story, story, 3)
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20, bias=31)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.get()).old_weights.ref == "pirate"
    await served.load_weights("pirate")
    assert not (await served.get()).HasField("old_weights")
    await refused(served.load_weights(story), "DATA_LOSS", "BLOB_MISSING")


async def test_a_lost_rank_ends_the_way_back_and_the_next_load_reads_again(served: Runtime) -> None:
    await deploy(served)
    await served.load_weights("pirate", keep_old_weights=True)
    served.ranks.die()
    await served.wait_for(lambda one: not one.HasField("old_weights"))
    await served.wait_for_state("READY")
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)
    assert "STAGE_MAP" in stages_of(await served.load_weights("story"))
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_ranks_lost_while_a_way_back_waits_map_the_files_again(served: Runtime) -> None:
    await deploy(served)
    await served.load_weights("pirate", keep_old_weights=True)
    call = await hold(served, token_request([5], 20))
    load = asyncio.create_task(served.load_weights("story"))
    await served.wait_for_operation()
    served.ranks.die()
    await refused(call, "UNAVAILABLE", "RANK_DIED")
    events = await load
    assert stages_of(events) == [f"STAGE_{one}" for one in ("RESOLVE", "SWAP", "FETCH", "VERIFY", "MAP", "SWAP")]
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


@pytest.mark.parametrize(
    ("policy", "kv"), [(FINISH, pb.KV_POLICY_KEEP), (CONTINUE, pb.KV_POLICY_INVALIDATE), (CONTINUE, 0), (9, 0)]
)
async def test_policies_that_contradict_each_other(served: Runtime, policy: Any, kv: Any) -> None:
    await deploy(served)
    load = served.load_weights("pirate", in_flight_policy=policy, kv_policy=kv)
    caught = await refused(load, "INVALID_ARGUMENT", "REQUEST_INVALID", "in_flight_policy")
    assert "without it FINISH_ON_OLD" in caught.message


async def test_only_weights_are_left_by_requests_that_finish(served: Runtime) -> None:
    await deploy(served)
    for call in (
        served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=FINISH)),
        served.unload(in_flight_policy=FINISH),
    ):
        await refused(call, "INVALID_ARGUMENT", "REQUEST_INVALID", "in_flight_policy")


async def test_old_weights_are_leased_and_their_memory_is_reserved(tmp_path: Path) -> None:
    need = state_need(make_manifest()).private_bytes
    async with serve_runtime(tmp_path, f"--memory={need + 3}") as served:
        story, pirate = await deploy(served), served.bundles.names["pirate"]
        await served.load_weights("pirate", keep_old_weights=True)

        async def expect(free_bytes: int, *digests: str) -> None:
            await until(lambda: {digest for _, digest in served.bundles.leases} == set(digests))
            assert (await served.info()).free_memory_bytes == free_bytes

        # Weights of `story` are a byte, those of `pirate` two.
        await expect(0, story, pirate)
        served.publish("third", bias=731)
        caught = await refused(served.load_weights("third"), "RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE")
        assert (caught.metadata["needed_bytes"], caught.metadata["free_bytes"]) == ("3", "1")
        assert not (await served.get()).HasField("old_weights"), "the load needed their room"
        await expect(1, story, pirate)
        await served.load_weights("story", keep_old_weights=True)
        await expect(0, story, pirate)
        for ref in ("pirate", "story"):
            await served.load_weights(ref, keep_old_weights=True)
            await expect(0, story, pirate)
        await served.load_weights("story")
        await expect(2, story)
        served.ranks.step_s = 0.02
        call = await hold(served, token_request([5], 40))
        await swap_under(served, "pirate")
        served.ranks.gate.clear()
        await expect(0, story, pirate)
        unload = asyncio.create_task(served.unload(in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT))
        await refused(call, "ABORTED", "REQUEST_ABORTED")
        await unload
        await expect(need + 3)


async def test_a_caller_that_leaves_in_the_middle_of_a_swap_leaves_the_memory_right(tmp_path: Path) -> None:
    need = state_need(make_manifest()).private_bytes
    async with serve_runtime(tmp_path, f"--memory={need + 3}") as served:
        await deploy(served)
        served.ranks.swap_gate.clear()
        load = asyncio.create_task(served.load_weights("pirate"))
        await served.ranks.swapping.wait()
        load.cancel()
        await asyncio.sleep(0.05)
        served.ranks.swap_gate.set()
        await served.wait_for(lambda one: one.roles[0].weight_epoch == 2)
        assert (await served.info()).free_memory_bytes == 1
        await served.load_weights("story", keep_old_weights=True)
        assert (await served.info()).free_memory_bytes == 0
        await served.unload()
        assert (await served.info()).free_memory_bytes == need + 3


async def test_a_client_that_leaves_frees_the_old_weights(served: Runtime) -> None:
    await deploy(served)
    call = await hold(served, token_request([5], 40))
    load = asyncio.create_task(served.load_weights("pirate", in_flight_policy=FINISH))
    await served.wait_for_operation()
    call.cancel()
    served.ranks.gate.set()
    await load
    await served.wait_for(lambda one: not one.HasField("old_weights"))
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31)
