"""LoadBundle over loopback."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.manifest import Serving
from bundle.store.blob_writer import BlobWriter
from bundle.store.reader import open_bundle
from execution.errors import RankDied, RankFailed
from targets.cpu import CPU
from tests.bundles.newer import publish_newer
from tests.bundles.published import publish
from tests.hang_guard import until
from tests.ranks.fakes import STATE_BYTES, expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, stages_of, tokens_of

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
    named = (role.role, role.bundle_ref, role.bundle_digest, role.weights_ref, role.weights_digest)
    assert named == (pb.ROLE_TARGET, "story", digest, "story", digest)
    assert role.weight_epoch == 1
    assert role.graph_abi_digest.startswith("sha256:")
    load = deployment.load
    assert (load.used_slots, load.total_slots, load.queue_capacity) == (0, 4, 256)
    assert (load.used_blocks, load.total_blocks, load.block_tokens) == (0, 4, 64)
    assert (deployment.weights_bytes, deployment.kv_bytes) == (1000, STATE_BYTES)
    assert [one.format for one in deployment.kept_kv] == ["float32"]
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
    caught = await refused(served.load("other"), "ALREADY_EXISTS", "DEPLOYMENT_EXISTS")
    assert "`kiln load-weights d REF`" in caught.message


async def test_load_outlives_its_client(served: Runtime) -> None:
    served.publish()
    served.load_gate.clear()
    call = served.control.LoadBundle(pb.LoadBundleRequest(ref="story", deployment_id="d"))
    await anext(aiter(call))
    await until(lambda: served.groups)
    call.cancel()
    await asyncio.sleep(0.05)
    served.load_gate.set()
    await served.wait_for(lambda one: one.state == pb.Deployment.STATE_READY)
    assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)


async def test_unknown_bundle(served: Runtime) -> None:
    caught = await refused(served.load("nothing:v3"), "NOT_FOUND", "BUNDLE_NOT_FOUND")
    assert caught.metadata["ref"] == "nothing:v3"
    assert caught.message == "no bundle 'nothing:v3': nothing has v1"
    assert list((await served.control.ListDeployments(pb.ListDeploymentsRequest())).deployments) == []


async def test_cores_are_placed_held_and_given_back(served: Runtime) -> None:
    served.publish("pair", tp_degree=2)
    first = (await served.load("pair", "a"))[-1].deployment
    second = (await served.load("pair", "b", [3, 2]))[-1].deployment
    assert (list(first.cores), list(second.cores)) == ([0, 1], [3, 2])
    info = await served.info()
    assert (info.total_cores, info.free_cores) == (4, 0)
    caught = await refused(served.load("pair", "c"), "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE")
    assert caught.metadata["free_cores"] == "none"
    assert "a holds 0, 1; b holds 2, 3. Unload a deployment" in caught.message
    await served.unload("a")
    for cores in ([0, 0], [0], [0, 1, 2]):
        await refused(served.load("pair", "c", cores=cores), "INVALID_ARGUMENT", "REQUEST_INVALID", "cores")
    for cores in ([0, 4], [-1, 0]):
        await refused(served.load("pair", "c", cores=cores), "RESOURCE_EXHAUSTED", "CORES_UNAVAILABLE")
    assert list((await served.load("pair", "c"))[-1].deployment.cores) == [0, 1]
    await refused(served.get("a"), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")


@pytest.mark.parametrize("options", [{"isa": "x86-64-v9", "format_": "aoti"}, {"kind": "trn2", "isa": "trn2"}])
async def test_bundle_for_other_hardware_is_refused(served: Runtime, options: dict[str, Any]) -> None:
    served.publish(**options)
    caught = await refused(served.load("story"), "FAILED_PRECONDITION", "ISA_UNSUPPORTED")
    metadata = caught.metadata
    assert options["isa"] in metadata["isa"]
    assert all(isa in metadata["supported"] for isa in CPU.isas.list_supported())


async def test_bundle_of_another_abi_is_refused(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = served.publish()
    monkeypatch.setattr("bundle.manifest_parser.ABI_VERSION", 2)
    await refused(served.load(digest), "FAILED_PRECONDITION", "ABI_UNSUPPORTED", "abi_version")


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
        later.setattr("bundle.manifest_parser.FEATURES", {"antigravity": "tokens fall upwards"})
        digest = publish_newer(served.store, served.publish(), required_features=["antigravity"])
    await refused(served.load(digest), "FAILED_PRECONDITION", "ABI_UNSUPPORTED", "required_features")


async def test_flipped_byte_is_named_before_anything_is_started(served: Runtime) -> None:
    digest = served.publish()
    blob = served.store.blob_path(open_bundle(served.store, digest).manifest.executables[0].blob)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.write_bytes(bytes(data))
    caught = await refused(served.load("story"), "DATA_LOSS", "BLOB_CORRUPT")
    assert blob.name in caught.message
    assert "executables/fake" in caught.message
    assert served.groups == []
    deployment = await served.get()
    assert deployment.state == pb.Deployment.STATE_FAILED
    assert blob.name in deployment.message
    assert (await served.info()).free_cores == 4
    await refused(served.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")


async def test_failed_load_can_be_tried_again(served: Runtime) -> None:
    served.publish()
    served.start_failures = [ZeroDivisionError("secret"), RankFailed(0, "no memory")]
    assert "secret" not in (await refused(served.load("story"), "INTERNAL", "ENGINE_FAILED")).message
    await refused(served.load("story"), "INTERNAL", "RANK_FAILED")
    served.load_failures = [RankDied(0, -9)]
    await refused(served.load("story"), "UNAVAILABLE", "RANK_DIED")
    assert served.ranks.is_closed
    served.load_failures = []
    assert (await served.load("story"))[-1].deployment.state == pb.Deployment.STATE_READY


async def test_broken_chat_template_fails_the_load(served: Runtime) -> None:
    served.publish(chat_template="{% if %}")
    caught = await refused(served.load("story"), "FAILED_PRECONDITION", "MANIFEST_INVALID")
    assert "line 1" in caught.message
    assert served.ranks.is_closed


async def test_bundle_service_that_is_gone(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--compiler=127.0.0.1:1") as served:
        caught = await refused(served.load("story"), "UNAVAILABLE", "BUNDLE_SOURCE_UNAVAILABLE")
        assert "127.0.0.1:1" in caught.message
        assert caught.retry_after_s


@pytest.mark.parametrize(("by_name", "reason"), [(True, "BUNDLE_SOURCE_CORRUPT"), (False, "BLOB_MISSING")])
async def test_a_bundle_that_its_store_has_lost_in_part(served: Runtime, by_name: bool, reason: str) -> None:
    digest = served.publish()
    lost = open_bundle(served.store, digest).blobs[-1].digest
    served.store.delete_blob(lost)
    caught = await refused(served.load("story" if by_name else digest), "DATA_LOSS", reason)
    assert lost in caught.message
    assert caught.retry_after_s is None, "it does not help to wait"


@pytest.mark.parametrize("num_failures", [2, 100], ids=["passes", "stays"])
async def test_a_full_disk_is_outlasted_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    monkeypatch.setattr("bundle.host.shortage.BRIEF_DELAYS_S", (0.01, 0.01, 0.01))
    failures, write = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))] * num_failures, BlobWriter.write

    def fail(writer: BlobWriter, data: bytes) -> int:
        if failures:
            raise failures.pop()
        return write(writer, data)

    async with serve_runtime(tmp_path, "--bundle-store", str(tmp_path / "elsewhere")) as served:
        digest = publish(served.store, executable=bytes(100_000))
        monkeypatch.setattr(BlobWriter, "write", fail)
        if num_failures > 2:
            await refused(served.load(digest), "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
            assert "disk space" in (await served.get()).message
            failures.clear()
        events = await served.load(digest)
        fetched = [event.progress for event in events if event.progress.stage == Stage.STAGE_FETCH]
        assert fetched[-1].done_bytes == fetched[-1].total_bytes > 100_000
        assert tokens_of(await served.generate([5])) == expected_tokens([5], 5)
