"""LoadWeights over loopback."""

from __future__ import annotations

import asyncio

from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.store.reader import open_bundle
from tests.bundles.published import OTHER_TOKENIZER_JSON
from tests.hang_guard import until
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, stages_of, token_request, tokens_of

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


async def test_weights_that_do_not_fit_or_are_corrupt_change_nothing(served: Runtime) -> None:
    await served.deploy()
    served.publish("wide", bias=31, graph_abi_digest="sha256:" + "1" * 64)
    caught = await refused(served.load_weights("wide"), "FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH")
    assert caught.metadata["actual"].endswith("1")
    for tokenizer in (OTHER_TOKENIZER_JSON, None):
        served.publish("foreign", bias=31, tokenizer=tokenizer)
        await refused(served.load_weights("foreign"), "FAILED_PRECONDITION", "TOKENIZER_MISMATCH")
    await refused(served.load_weights("nothing"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
    blob = open_bundle(served.store, served.publish("corrupt", bias=31)).manifest.weight_sets[0].shards[0].blob
    path = served.store.blob_path(str(blob))
    path.chmod(0o644)
    path.write_bytes(b"32")
    assert str(blob) in (await refused(served.load_weights("corrupt"), "DATA_LOSS", "BLOB_CORRUPT")).message
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.get()).roles[0].weight_epoch == 1


async def test_second_weight_load_is_refused_while_one_runs(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    call = await hold(served, token_request([5], 20))
    first = asyncio.create_task(served.load_weights("pirate"))
    await until(lambda: served.ranks.staged_bias is not None)
    await refused(served.load_weights("pirate"), "ABORTED", "LOAD_IN_PROGRESS")
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
    await until(lambda: served.ranks.staged_bias is None)
    served.ranks.gate.set()
    assert tokens_of([event async for event in call]) == expected_tokens([5], 20)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.load_weights("pirate"))[-1].result.weight_epoch == 2


async def test_weight_policies(served: Runtime) -> None:
    await served.deploy()
    served.publish("pirate", bias=31)
    call = await hold(served, token_request([5], 20))
    refuse = served.load_weights("pirate", in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    await refused(refuse, "FAILED_PRECONDITION", "REQUESTS_IN_FLIGHT")
    load = asyncio.create_task(
        served.load_weights(
            "pirate", in_flight_policy=pb.IN_FLIGHT_POLICY_CONTINUE, kv_policy=pb.KV_POLICY_KEEP, role=pb.ROLE_TARGET
        )
    )
    await until(lambda: served.ranks.staged_bias is not None)
    served.ranks.gate.set()
    assert (await load)[-1].result.aborted_requests == 0
    assert {event.weight_epoch async for event in call} == {1, 2}
    call = await hold(served, token_request([5], 20))
    load = asyncio.create_task(served.load_weights("story", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT))
    await until(lambda: served.ranks.staged_bias is not None)
    served.ranks.gate.set()
    assert (await load)[-1].result.aborted_requests == 1
    await refused(call, "ABORTED", "REQUEST_ABORTED")
