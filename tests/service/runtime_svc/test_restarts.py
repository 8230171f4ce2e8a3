"""What outlives a runtime: its deployments, on their cores, with their bundles, weights and epochs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.store.layout import Layout
from execution.errors import RankFailed
from runtime_svc.errors import StateUnwritable
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of


def named(**names: str) -> Any:
    """Prepares a bundle service that knows these names."""
    return lambda bundles: bundles.names.update(names)


async def test_deployments_are_loaded_again_as_they_were(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        story, pair = first.publish(), first.publish("pair", tp_degree=2)
        pirate = first.publish("pirate", bias=31)
        await first.load("pair", "b", [3, 1], threads_per_core=2, target_inter_token_latency=Duration(nanos=1))
        await first.load("story", "a")
        await first.load_weights("pirate", "a")
        await first.load("story", "unloaded")
        await first.unload("unloaded")
        before = [await first.get("a"), await first.get("b")]
    # Names have moved on; the deployments have not.
    async with serve_runtime(tmp_path, prepare=named(story=pair, pair=story, pirate=story)) as second:
        assert [one.deployment_id for one in second.server.deployments.list()] == ["a", "b"]
        for old in before:
            new = await second.wait_for_state("READY", old.id)
            assert (new.roles, new.cores, new.threads_per_core) == (old.roles, old.cores, old.threads_per_core)
            assert new.create_time == old.create_time
            assert new.target_inter_token_latency == old.target_inter_token_latency
        assert (await second.get("b")).target_inter_token_latency.nanos == 1
        role = (await second.get("a")).roles[0]
        assert (role.bundle_digest, role.weights_digest, role.weight_epoch) == (story, pirate, 2)
        events = await second.generate([5], deployment_id="a")
        assert tokens_of(events) == expected_tokens([5], 5, bias=31)
        assert {event.weight_epoch for event in events} == {2}
        assert (await second.load_weights(story, "a"))[-1].result.weight_epoch == 3
        assert sorted(one["num_threads"] for one in second.started_with) == [1, 2]
        assert second.bundles.lookups == [], "all of it was local"


async def test_server_is_healthy_while_deployments_load(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        digest = (await first.deploy()).roles[0].bundle_digest
    async with serve_runtime(tmp_path, prepare=named(story=digest)) as second:
        second.load_gate.clear()
        deployment = await second.get()
        assert (deployment.state, list(deployment.cores)) == (pb.Deployment.STATE_LOADING, [0])
        caught = await refused(second.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
        assert "LOADING" in caught.message
        joined = asyncio.create_task(second.load(digest))
        await asyncio.sleep(0.05)
        second.load_gate.set()
        assert (await joined)[-1].deployment.state == pb.Deployment.STATE_READY
        assert len(second.groups) == 1


async def test_bundle_service_that_is_away_is_waited_for(tmp_path: Path) -> None:
    elsewhere = ("--bundle-store", str(tmp_path / "elsewhere"))
    async with serve_runtime(tmp_path, *elsewhere) as first:
        digest = (await first.deploy()).roles[0].bundle_digest

    def lose(bundles: LayoutBundleService) -> None:
        bundles.is_away = True
        for path in (tmp_path / "cache/blobs").rglob("*"):
            if path.is_file():
                path.unlink()
        Layout.create(tmp_path / "cache/blobs")

    async with serve_runtime(tmp_path, *elsewhere, prepare=lose) as second:
        await second.wait_for(lambda one: "does not answer" in one.message)
        assert (await second.get()).state == pb.Deployment.STATE_LOADING
        second.bundles.is_away = False
        deployment = await second.wait_for_state("READY")
        assert (deployment.message, deployment.roles[0].bundle_digest) == ("", digest)


async def test_what_cannot_be_loaded_again_is_kept_and_tried_at_every_start(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        digest = (await first.deploy()).roles[0].bundle_digest

    for fails in (True, False, True):
        async with serve_runtime(tmp_path, prepare=named(story=digest)) as again:
            again.start_failures = [RankFailed(0, "no memory")] if fails else []
            deployment = await again.wait_for_state("FAILED" if fails else "READY")
            assert ("no memory" in deployment.message) is fails
            assert (await again.info()).free_cores == (4 if fails else 3)
    async with serve_runtime(tmp_path, "--memory=1KiB") as again:
        assert "bytes of memory are needed" in (await again.wait_for_state("FAILED")).message
        await again.unload()
    async with serve_runtime(tmp_path) as again:
        await refused(again.get(), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
        assert (await again.info()).free_cores == 4


async def test_bundle_that_is_gone_fails_and_takes_no_other(tmp_path: Path) -> None:
    elsewhere = ("--bundle-store", str(tmp_path / "elsewhere"))
    async with serve_runtime(tmp_path, *elsewhere) as first:
        await first.deploy()
    (tmp_path / "cache/blobs").rename(tmp_path / "old")
    (tmp_path / "store").rename(tmp_path / "old store")
    async with serve_runtime(tmp_path, *elsewhere) as second:
        second.publish("story", bias=7)
        deployment = await second.wait_for_state("FAILED")
        assert "no bundle" in deployment.message or "not" in deployment.message
        assert second.groups == []


async def test_fewer_cores_than_before(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        first.publish("pair", tp_degree=2)
        await first.load("pair", "a", [2, 3])
        await first.load("pair", "b", [0, 1])
    async with serve_runtime(tmp_path, "--cores=2") as second:
        ready = await second.wait_for_state("READY", "a")
        assert list(ready.cores) == [0, 1], "it was asked for without naming cores, or they are gone"
        waiting = await second.wait_for(lambda one: "free cores: none" in one.message, "b")
        assert waiting.state == pb.Deployment.STATE_LOADING
        await second.unload("a")
        assert list((await second.wait_for_state("READY", "b")).cores) == [0, 1]


async def test_disk_that_takes_no_record_fails_the_load(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise StateUnwritable("runtime.db", "disk full")

    digest = publish(served.store)
    monkeypatch.setattr(served.server.deployments._records.deployments, "save", full)
    await refused(served.load(digest), "INTERNAL", "STATE_UNWRITABLE")
    assert served.groups == []
    assert (await served.info()).free_cores == 4


async def test_swap_whose_client_left_is_recorded(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy()
        pirate = first.publish("pirate", bias=31)
        first.ranks.swap_gate.clear()
        call = first.control.LoadWeights(pb.LoadWeightsRequest(deployment_id="d", ref="pirate"))
        async for event in call:
            if event.progress.stage == pb.LoadProgress.STAGE_SWAP:
                break
        await asyncio.wait_for(first.ranks.swapping.wait(), HANG_S)
        call.cancel()
        await asyncio.sleep(0.05)
        first.ranks.swap_gate.set()
        await first.wait_for(lambda one: one.roles[0].weight_epoch == 2)
    async with serve_runtime(tmp_path) as second:
        role = (await second.wait_for_state("READY")).roles[0]
        assert (role.weights_digest, role.weight_epoch) == (pirate, 2)
        assert tokens_of(await second.generate([5], 3)) == expected_tokens([5], 3, bias=31)
