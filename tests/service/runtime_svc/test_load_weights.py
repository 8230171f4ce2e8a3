"""LoadWeights over loopback."""

from __future__ import annotations

import asyncio

from kiln.runtime.v1 import runtime_pb2 as pb

from tests.bundles.published import OTHER_TOKENIZER_JSON
from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, details_of, fields_of, hold, raises, stages_of, token_request, tokens_of

Stage = pb.LoadProgress


async def test_new_weights_serve_under_the_next_epoch(served: Runtime) -> None:
    story = (await served.deploy()).roles[0].bundle_digest
    pirate = served.publish("pirate", bias=31)
    events = await served.load_weights("pirate")
    assert stages_of(events) == ["STAGE_RESOLVE", "STAGE_FETCH", "STAGE_VERIFY", "STAGE_MAP", "STAGE_SWAP"]
    result = events[-1].result
    assert (result.previous_weight_epoch, result.weight_epoch, result.aborted_requests) == (1, 2, 0)
    assert result.pause_duration.ToNanoseconds() > 0
    role = result.deployment.roles[0]
    assert (role.bundle_ref, role.bundle_digest) == ("story", story)
    assert (role.weights_ref, role.weights_digest, role.weight_epoch) == ("pirate", pirate, 2)
    after = await served.generate([5])
    assert tokens_of(after) == expected_tokens([5], 5, bias=31)
    assert {event.weight_epoch for event in after} == {2}
    served.ranks.die()
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5, bias=31), "a restart keeps them"
    await served.load_weights("story")
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_weights_that_do_not_fit_change_nothing(served: Runtime) -> None:
    await served.deploy()
    served.publish("wide", bias=31, graph_abi_digest="sha256:" + "1" * 64)
    async with raises("FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH") as caught:
        await served.load_weights("wide")
    assert details_of(caught[0])[0].metadata["actual"].endswith("1")
    served.publish("foreign", bias=31, tokenizer=OTHER_TOKENIZER_JSON)
    async with raises("FAILED_PRECONDITION", "TOKENIZER_MISMATCH"):
        await served.load_weights("foreign")
    served.publish("mute", bias=31, tokenizer=None)
    async with raises("FAILED_PRECONDITION", "TOKENIZER_MISMATCH"):
        await served.load_weights("mute")
    async with raises("NOT_FOUND", "BUNDLE_NOT_FOUND"):
        await served.load_weights("nothing")
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.load_weights("No Such Ref")
    assert fields_of(caught[0]) == ["ref"]
    async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
        await served.load_weights("story", "nobody")
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.get()).roles[0].weight_epoch == 1


async def test_corrupt_weights_leave_the_old_ones_serving(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    blob = next(path for path in (served.store.root / "blobs/sha256").iterdir() if path.read_bytes() == b"31")
    blob.chmod(0o644)
    blob.write_bytes(b"32")
    async with raises("DATA_LOSS", "BLOB_CORRUPT") as caught:
        await served.load_weights("pirate")
    assert blob.name in str(caught[0].details())
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_second_weight_load_is_refused_while_one_runs(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    call = await hold(served, token_request([5], 20))
    first = asyncio.create_task(served.load_weights("pirate"))
    async with asyncio.timeout(HANG_S):
        while served.ranks.staged_bias is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    async with raises("ABORTED", "LOAD_IN_PROGRESS"):
        await served.load_weights("pirate")
    served.ranks.gate.set()
    assert (await first)[-1].result.weight_epoch == 2
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20), "it waited for the running one"


async def test_client_that_leaves_withdraws_the_swap(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    call = await hold(served, token_request([5], 20))
    load = served.control.LoadWeights(pb.LoadWeightsRequest(deployment_id="d", ref="pirate"))
    async for event in load:
        if event.progress.stage == Stage.STAGE_SWAP:
            break
    load.cancel()
    async with asyncio.timeout(HANG_S):
        while served.ranks.staged_bias is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    served.ranks.gate.set()
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.load_weights("pirate"))[-1].result.weight_epoch == 2


async def test_weight_policies(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    call = await hold(served, token_request([5], 20))
    async with raises("FAILED_PRECONDITION", "REQUESTS_IN_FLIGHT"):
        await served.load_weights("pirate", in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    load = asyncio.create_task(
        served.load_weights(
            "pirate", in_flight_policy=pb.IN_FLIGHT_POLICY_CONTINUE, kv_policy=pb.KV_POLICY_KEEP, role=pb.ROLE_TARGET
        )
    )
    async with asyncio.timeout(HANG_S):
        while served.ranks.staged_bias is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    served.ranks.gate.set()
    assert (await load)[-1].result.aborted_requests == 0
    assert {event.weight_epoch async for event in call} == {1, 2}
    call = await hold(served, token_request([5], 20))
    load = asyncio.create_task(served.load_weights("story", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT))
    async with asyncio.timeout(HANG_S):
        while served.ranks.staged_bias is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    served.ranks.gate.set()
    assert (await load)[-1].result.aborted_requests == 1
    async with raises("ABORTED", "REQUEST_ABORTED"):
        async for _ in call:
            pass
    async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as caught:
        await served.load_weights("story", role=pb.ROLE_DRAFT)
    assert fields_of(caught[0]) == ["role"]
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.load_weights("story", role=9, kv_policy=9, in_flight_policy=9)
    assert fields_of(caught[0]) == ["role", "kv_policy", "in_flight_policy"]
