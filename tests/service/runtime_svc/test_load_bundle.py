"""LoadBundle over loopback."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.blob_writer import BlobWriter
from bundle.manifest import Serving
from bundle.reader import open_bundle
from execution.errors import RankDied, RankFailed
from runtime_svc.errors import BundleSourceUnavailable
from targets.cpu import CPU
from tests.bundles.newer import publish_newer
from tests.bundles.published import publish
from tests.hang_guard import HANG_S
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.runtime import Runtime, details_of, fields_of, raises, serve_runtime, stages_of, tokens_of

Stage = pb.LoadProgress


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
    assert (deployment.load.used_blocks, deployment.load.total_blocks, deployment.load.block_tokens) == (0, 4, 64)
    assert (deployment.weights_bytes, deployment.kv_bytes) == (1000, STATE_BYTES)
    assert served.ranks.is_warm
    assert served.started_with == [{"num_threads": 1}]


async def test_bundle_may_ask_for_no_warm_up(served: Runtime) -> None:
    served.publish(serving=Serving(skip_warmup=True))
    events = await served.load("story")
    assert not served.ranks.is_warm
    assert "STAGE_WARMUP" not in stages_of(events)


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
    async with raises("ALREADY_EXISTS", "DEPLOYMENT_EXISTS") as caught:
        await served.load("other")
    assert "`kiln load-weights d REF`" in str(caught[0].details())


async def test_load_outlives_its_client(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    call = served.control.LoadBundle(pb.LoadBundleRequest(ref="story", deployment_id="d"))
    await anext(aiter(call))
    async with asyncio.timeout(HANG_S):
        while not served.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    call.cancel()
    await asyncio.sleep(0.05)
    served.load_gate.set()
    async with asyncio.timeout(HANG_S):
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
    assert caught[0].details() == "no bundle 'nothing:v3': nothing has v1"
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
    assert "a holds 0, 1; b holds 2, 3. Unload a deployment" in str(caught[0].details())
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
    assert all(isa in metadata["supported"] for isa in CPU.isas.list_supported())


async def test_bundle_of_another_abi_is_refused(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = served.publish()
    monkeypatch.setattr("bundle.manifest.ABI_VERSION", 2)
    async with raises("FAILED_PRECONDITION", "ABI_UNSUPPORTED") as caught:
        await served.load(digest)
    assert fields_of(caught[0]) == ["abi_version"]


async def test_bundle_of_a_later_release_is_served(served: Runtime) -> None:
    """Its manifest has fields that this release ignores, and bytes that it would not write."""
    digest = publish_newer(served.store, served.publish())
    await served.load(digest)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
    assert (await served.get()).roles[0].bundle_digest == digest


async def test_bundle_with_an_unknown_required_feature_is_refused(
    served: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("bundle.manifest.FEATURES", {"antigravity": "tokens fall upwards"})
        digest = publish_newer(served.store, served.publish(), required_features=["antigravity"])
    async with raises("FAILED_PRECONDITION", "ABI_UNSUPPORTED") as caught:
        await served.load(digest)
    assert fields_of(caught[0]) == ["required_features"]


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


@pytest.mark.parametrize(("by_name", "reason"), [(True, "BUNDLE_SOURCE_CORRUPT"), (False, "BLOB_MISSING")])
async def test_a_bundle_that_its_store_has_lost_in_part(served: Runtime, by_name: bool, reason: str) -> None:
    digest = served.publish()
    served.store.delete_blob(open_bundle(served.store, digest).blobs[-1].digest)
    async with raises("DATA_LOSS", reason) as caught:
        await served.load("story" if by_name else digest)
    assert "no bundle" not in str(caught[0].details())


@pytest.mark.parametrize("num_failures", [2, 100], ids=["passes", "stays"])
async def test_a_full_disk_is_outlasted_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    monkeypatch.setattr("bundle.shortage.BRIEF_DELAYS_S", (0.01, 0.01, 0.01))
    failures, write = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))] * num_failures, BlobWriter.write

    def fail(writer: BlobWriter, data: bytes) -> int:
        if failures:
            raise failures.pop()
        return write(writer, data)

    async with serve_runtime(tmp_path, "--bundle-store", str(tmp_path / "elsewhere")) as served:
        digest = publish(served.store)
        monkeypatch.setattr(BlobWriter, "write", fail)
        if num_failures > 2:
            async with raises("RESOURCE_EXHAUSTED", "RESOURCES_SHORT"):
                await served.load(digest)
            assert "disk space" in (await served.get()).message
            failures.clear()
        assert (await served.load(digest))[-1].deployment.state == pb.Deployment.STATE_READY
