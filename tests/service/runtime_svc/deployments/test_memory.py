"""Memory: what bundles need, and what is shared."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.manifest import WeightTensor
from execution.ranks.step_memory import StepLayout
from runtime_svc.deployments.memory import MemoryNeed, MemoryPool, state_need, weights_need
from runtime_svc.errors import MemoryUnavailable
from tests.bundles.manifests import with_mutable_set
from tests.ranks.fakes import DIGEST, make_manifest
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime

#: Keys and values of five slots, 64 positions, float32.
KV_BYTES = 2 * 5 * 64 * 4


def test_needs_are_read_off_the_manifest() -> None:
    manifest = make_manifest(tp_degree=2, weights_size_bytes=100)
    assert state_need(manifest).private_bytes == 2 * KV_BYTES + StepLayout.of(manifest).size_bytes
    assert weights_need(manifest) == MemoryNeed(0, {DIGEST: 100})


def test_awaited_weights_need_what_their_tensors_will_take() -> None:
    manifest = make_manifest()
    (weight_set,) = manifest.weight_sets
    tensors = (
        WeightTensor(name="a", dtype="bfloat16", shape=(3, 4)),
        WeightTensor(name="b", dtype="float32", shape=(5,)),
    )
    shard = msgspec.structs.replace(weight_set.shards[0], blob=None, size_bytes=0, tensors=tensors)
    weight_sets = (msgspec.structs.replace(weight_set, shards=(shard,)),)
    described = msgspec.structs.replace(manifest, weight_sets=weight_sets)
    assert weights_need(described) == MemoryNeed(2 * 12 + 4 * 5)


def test_mutable_sets_are_needed_beside_any_weights() -> None:
    manifest = make_manifest(tp_degree=2, weights_size_bytes=100)
    described = with_mutable_set(manifest, (3, 8, 2), (3,))
    assert state_need(described).private_bytes == state_need(manifest).private_bytes + 2 * 4 * (48 + 3)
    assert weights_need(described) == weights_need(manifest)


def test_blobs_count_once_and_go_with_their_last_user() -> None:
    pool = MemoryPool(1000)
    one, two = MemoryNeed(100, {"a": 300}), MemoryNeed(50, {"a": 300, "b": 200})
    pool.reserve(one)
    pool.reserve(two)
    assert pool.free_bytes == 1000 - 100 - 300 - 50 - 200
    with pytest.raises(MemoryUnavailable) as caught:
        pool.reserve(MemoryNeed(300), MemoryNeed(0, {"b": 200, "c": 51}))
    assert caught.value.metadata == {
        "needed_bytes": "351",
        "free_bytes": "350",
        "total_bytes": "1000",
        "missing_bytes": "1",
    }
    assert pool.free_bytes == 350, "nothing was taken"
    pool.release(one)
    assert pool.free_bytes == 450
    pool.release(two)
    assert pool.free_bytes == 1000


async def test_loads_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    manifest = make_manifest()
    need = state_need(manifest).private_bytes
    async with serve_runtime(tmp_path, f"--memory={2 * need + 3}") as served:
        served.publish("story")
        info = await served.info()
        assert info.total_memory_bytes == info.free_memory_bytes == 2 * need + 3
        await served.load("story", "a")
        assert (await served.info()).free_memory_bytes == need + 2
        await served.load("story", "b")
        assert (await served.info()).free_memory_bytes == 2, "both map the same weights"
        caught = await refused(served.load("story", "c"), "RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE")
        assert caught.metadata["free_bytes"] == "2"
        assert (await served.info()).free_cores == 2
        served.publish("pirate", bias=310)
        await refused(served.load_weights("pirate", "a"), "RESOURCE_EXHAUSTED", "MEMORY_UNAVAILABLE")
        served.publish("small", bias=31)
        await served.load_weights("small", "a")
        assert (await served.info()).free_memory_bytes == 0
        await served.unload("a")
        await served.unload("b")
        assert (await served.info()).free_memory_bytes == 2 * need + 3


async def test_threads_are_the_deployments_or_the_servers(served: Runtime) -> None:
    served.publish("story")
    own = (await served.load("story", "own", threads_per_core=3))[-1].deployment
    default = (await served.load("story", "default"))[-1].deployment
    assert (own.threads_per_core, default.threads_per_core) == (3, 1)
    assert [one["num_threads"] for one in served.started_with] == [3, 1]
    caught = await refused(served.load("story", "own", threads_per_core=2), "ALREADY_EXISTS", "DEPLOYMENT_EXISTS")
    assert "threads_per_core 3" in caught.message
    await refused(served.load("story", "own", cores=[3]), "ALREADY_EXISTS", "DEPLOYMENT_EXISTS")
    assert (await served.load("story", "own"))[-1].deployment.state == pb.Deployment.STATE_READY
