"""The control plane over loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.reader import open_bundle
from execution.errors import RankDied, RankFailed
from execution.isa import supported_isas
from runtime_svc.errors import BundleSourceUnavailable
from tests.runtime_svc.conftest import Runtime, details_of, fields_of, raises, serve_runtime, token_request, tokens_of
from tests.runtime_svc.fakes import STATE_BYTES, expected_tokens
from tests.runtime_svc.published import OTHER_TOKENIZER_JSON

Stage = pb.LoadProgress


def stages_of(events: list[Any]) -> list[str]:
    """Stages in order, each once."""
    names = [Stage.Stage.Name(event.progress.stage) for event in events if event.HasField("progress")]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


async def hold(served: Runtime, request: generation.GenerateRequest) -> grpc.aio.UnaryStreamCall[Any, Any]:
    """A request that is in the middle of a step until the caller opens the gate."""
    served.ranks.gate.clear()
    call = served.generation.Generate(request)
    await anext(aiter(call))
    await served.wait_for_slots(1)
    return call


# --- LoadBundle -------------------------------------------------------------------------------------------------------


async def test_load_reports_every_stage_and_the_deployment(served: Runtime) -> None:
    digest = served.publish()
    events = await served.load("story")
    assert stages_of(events) == ["STAGE_RESOLVE", "STAGE_FETCH", "STAGE_VERIFY", "STAGE_MAP", "STAGE_WARMUP"]
    verified = [event.progress for event in events if event.progress.stage == Stage.STAGE_VERIFY][-1]
    assert verified.done_bytes == verified.total_bytes > 0
    deployment = events[-1].deployment
    assert (deployment.id, deployment.state, list(deployment.cores)) == ("d", pb.Deployment.STATE_READY, [0])
    role = deployment.roles[0]
    assert (role.role, role.bundle_ref, role.bundle_digest, role.weights_ref, role.weights_digest) == (
        pb.ROLE_TARGET,
        "story",
        digest,
        "story",
        digest,
    )
    assert role.weight_epoch == 1
    assert role.graph_abi_digest.startswith("sha256:")
    capabilities = deployment.capabilities
    assert (capabilities.max_context_length, capabilities.max_length, capabilities.max_batch_size) == (16, 64, 4)
    assert (capabilities.dynamic_sampling, capabilities.max_top_k, capabilities.logprobs, capabilities.chat) == (
        True,
        50,
        True,
        True,
    )
    assert list(capabilities.eos_token_ids) == [2]
    assert (deployment.load.used_slots, deployment.load.total_slots, deployment.load.queue_capacity) == (0, 4, 256)
    assert (deployment.weights_bytes, deployment.kv_bytes) == (1000, STATE_BYTES)
    assert served.ranks.is_warm
    assert served.started_with == [{"num_threads": 1}]


async def test_bundle_may_ask_for_no_warm_up(served: Runtime) -> None:
    await served.deploy(config={"neuron_config": {"skip_warmup": True}})
    assert not served.ranks.is_warm


async def test_equal_load_answers_at_once_and_joins_one_under_way(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    loads = [asyncio.create_task(served.load("story")) for _ in range(2)]
    await asyncio.sleep(0.1)
    served.load_gate.set()
    assert [events[-1].deployment.state for events in await asyncio.gather(*loads)] == [pb.Deployment.STATE_READY] * 2
    assert len(served.groups) == 1
    assert (await served.load("story"))[-1].deployment.state == pb.Deployment.STATE_READY
    assert len(served.groups) == 1
    served.publish("other", bias=7)
    async with raises("ALREADY_EXISTS", "DEPLOYMENT_EXISTS"):
        await served.load("other")


async def test_load_outlives_its_client(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    call = served.control.LoadBundle(pb.LoadBundleRequest(ref="story", deployment_id="d"))
    await anext(aiter(call))
    async with asyncio.timeout(2):
        while not served.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    call.cancel()
    await asyncio.sleep(0.05)
    served.load_gate.set()
    async with asyncio.timeout(2):
        while (await served.get()).state != pb.Deployment.STATE_READY:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_malformed_load_names_every_field(served: Runtime) -> None:
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
        await served.load("No Such Ref", "Not An Id")
    assert fields_of(caught[0]) == ["deployment_id", "ref"]
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID"):
        await served.load("story", "")


async def test_unknown_bundle(served: Runtime) -> None:
    async with raises("NOT_FOUND", "BUNDLE_NOT_FOUND") as caught:
        await served.load("nothing:v3")
    assert details_of(caught[0])[0].metadata["ref"] == "nothing:v3"
    assert list((await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments) == []


async def test_cores_are_placed_held_and_given_back(served: Runtime) -> None:
    served.publish("pair", tp_degree=2)
    first = (await served.load("pair", "a"))[-1].deployment
    second = (await served.load("pair", "b", [3, 2]))[-1].deployment
    assert (list(first.cores), list(second.cores)) == ([0, 1], [3, 2])
    info = await served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.total_cores, info.free_cores) == (4, 0)
    async with raises("RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE") as caught:
        await served.load("pair", "c")
    assert details_of(caught[0])[0].metadata["free_cores"] == "none"
    await served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="a"))
    assert list((await served.load("pair", "c"))[-1].deployment.cores) == [0, 1]
    async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
        await served.get("a")


@pytest.mark.parametrize(
    ("cores", "code", "reason"),
    [
        ([0, 0], "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ([0], "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ([0, 1, 2], "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ([3, 4], "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE"),
        ([-1, 0], "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE"),
    ],
)
async def test_cores_that_cannot_be_had(served: Runtime, cores: list[int], code: str, reason: str) -> None:
    served.publish("pair", tp_degree=2)
    async with raises(code, reason):
        await served.load("pair", cores=cores)
    info = await served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert info.free_cores == 4, "nothing has changed"


@pytest.mark.parametrize("options", [{"isa": "x86-64-v9", "format_": "aoti"}, {"kind": "trn2", "isa": "trn2"}])
async def test_bundle_for_other_hardware_is_refused(served: Runtime, options: dict[str, Any]) -> None:
    served.publish(**options)
    async with raises("FAILED_PRECONDITION", "ISA_UNSUPPORTED") as caught:
        await served.load("story")
    metadata = details_of(caught[0])[0].metadata
    assert options["isa"] in metadata["isa"]
    assert all(isa in metadata["supported"] for isa in supported_isas())


async def test_bundle_of_another_abi_is_refused(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = served.publish()
    monkeypatch.setattr("bundle.manifest.ABI_VERSION", 2)
    async with raises("FAILED_PRECONDITION", "ABI_UNSUPPORTED") as caught:
        await served.load(digest)
    assert fields_of(caught[0]) == ["abi_version"]


async def test_flipped_byte_is_named_before_anything_is_started(served: Runtime) -> None:
    digest = served.publish()
    blob = served.store.blob_path(open_bundle(served.store, digest).manifest.executables[0].blob)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.write_bytes(bytes(data))
    async with raises("DATA_LOSS", "BLOB_CORRUPT") as caught:
        await served.load("story")
    assert blob.name in str(caught[0].details())
    assert served.groups == []
    deployment = await served.get()
    assert deployment.state == pb.Deployment.STATE_FAILED
    assert blob.name in deployment.message
    assert (await served.control.GetServerInfo(pb.GetServerInfoRequest())).free_cores == 4
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.generate([5])


async def test_failed_load_can_be_tried_again(served: Runtime) -> None:
    served.publish()
    served.start_failures = [RankFailed(0, "no memory")]
    async with raises("INTERNAL", "RANK_FAILED"):
        await served.load("story")
    served.load_failures = [RankDied(0, -9)]
    async with raises("UNAVAILABLE", "RANK_DIED"):
        await served.load("story")
    assert served.ranks.is_closed
    served.load_failures = []
    assert (await served.load("story"))[-1].deployment.state == pb.Deployment.STATE_READY


async def test_own_bug_in_a_load_is_told_without_details(served: Runtime) -> None:
    served.publish()
    served.start_failures = [ZeroDivisionError("secret")]
    async with raises("INTERNAL", "ENGINE_FAILED") as caught:
        await served.load("story")
    assert "secret" not in str(caught[0].details())


async def test_broken_chat_template_fails_the_load(served: Runtime) -> None:
    served.publish(chat_template="{% if %}")
    async with raises("FAILED_PRECONDITION", "MANIFEST_INVALID") as caught:
        await served.load("story")
    assert "line 1" in str(caught[0].details())
    assert served.ranks.is_closed


async def test_bundle_service_that_is_gone(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(ref: str) -> None:
        raise BundleSourceUnavailable("127.0.0.1:1", "connection refused")

    monkeypatch.setattr(served.server.deployments.library._source, "resolve", gone)
    async with raises("UNAVAILABLE", "BUNDLE_SOURCE_UNAVAILABLE"):
        await served.load("story")


async def test_remote_bundle_is_fetched_into_the_cache(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--bundle-store", str(tmp_path / "elsewhere")) as served:
        served.publish(executable=bytes(100_000))
        events = await served.load("story")
        fetched = [event.progress for event in events if event.progress.stage == Stage.STAGE_FETCH]
        assert fetched[-1].done_bytes == fetched[-1].total_bytes > 100_000
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


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
    async with asyncio.timeout(2):
        while (await served.get()).state != pb.Deployment.STATE_UNLOADING:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
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
    await asyncio.sleep(0.05)
    await served.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id="d"))
    await unload


async def test_unload_ends_a_load(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    load = asyncio.create_task(served.load("story"))
    async with asyncio.timeout(2):
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
    assert (info.schema_revision, info.minimum_client_revision, info.target) == (1, 1, "cpu")
    assert tuple(info.isas) == supported_isas()
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
    await asyncio.sleep(0.02)
    served.ranks.gate.set()
    receipt = await reset
    assert (receipt.affected_sequences, receipt.freed_slots) == (1, 1)
    async with raises("ABORTED", "REQUEST_ABORTED") as caught:
        async for _ in call:
            pass
    assert details_of(caught[0])[0].metadata["cause"] == "ResetKVCache"


async def test_reset_that_refuses(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, token_request([5], 20))
    request = pb.ResetKVCacheRequest(deployment_id="d", in_flight_policy=pb.IN_FLIGHT_POLICY_REFUSE)
    reset = asyncio.ensure_future(served.control.ResetKVCache(request))
    await asyncio.sleep(0.02)
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
    async with asyncio.timeout(2):
        while (await served.get()).state != pb.Deployment.STATE_RECOVERING:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.control.ResetKVCache(pb.ResetKVCacheRequest(deployment_id="d"))
    async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
        await served.load_weights("story")
    queued = asyncio.create_task(served.generate([5]))
    await asyncio.sleep(0.05)
    served.load_gate.set()
    assert tokens_of(await queued) == expected_tokens([5], 5), "requests queue meanwhile"


# --- LoadWeights ------------------------------------------------------------------------------------------------------


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
    async with asyncio.timeout(2):
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
    async with asyncio.timeout(2):
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
    async with asyncio.timeout(2):
        while served.ranks.staged_bias is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    served.ranks.gate.set()
    assert (await load)[-1].result.aborted_requests == 0
    assert {event.weight_epoch async for event in call} == {1, 2}
    call = await hold(served, token_request([5], 20))
    load = asyncio.create_task(served.load_weights("story", in_flight_policy=pb.IN_FLIGHT_POLICY_ABORT))
    async with asyncio.timeout(2):
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
