"""Compiles with room for adapters, by real builds at optimization level 0."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.abi.tensor import DTYPES
from bundle.manifest import ADAPTER_WEIGHTS, Manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from compiler_svc.records import GOLDEN_TYPE
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.compiler_process import run_compiler
from tests.servers.running_compiler import Client, response_of

CONFIG: dict[str, Any] = {"seq_len": 16, "max_context_length": 8, "tp_degree": 2, "on_device_sampling_config": {}}
LEVEL = pb.OPTIMIZATION_LEVEL_O0


@pytest.fixture
async def client(home: Path) -> AsyncIterator[Client]:
    async with run_compiler(home) as compiler:
        yield compiler.client


async def compile_tiny(client: Client, **lora: Any) -> pb.CompileResponse:
    return await client.build(name="tiny", neuron_config=CONFIG | {"lora_config": lora}, optimization_level=LEVEL)


def read_manifest(home: Path, digest: str) -> Manifest:
    return open_bundle(Layout(home / "store"), digest).manifest


def measure_room(manifest: Manifest) -> list[int]:
    """Bytes of each rank's adapters."""
    sizes = dict(DTYPES)
    return [
        sum(math.prod(one.shape) * sizes[one.dtype].size_bytes for one in shard.tensors)
        for shard in manifest.shards(mutable=True)
    ]


async def test_a_bundle_has_the_room_that_its_plan_says(client: Client, home: Path) -> None:
    lora = {"max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 5, "eviction_policy": "lfu"}
    response = await compile_tiny(client, **lora)
    manifest = read_manifest(home, response.digest)
    assert [one.name for one in manifest.weight_sets if one.is_mutable] == [ADAPTER_WEIGHTS]
    assert all("adapters" in executable.flags for executable in manifest.executables)
    assert (manifest.serving.adapter_eviction, manifest.serving.max_host_adapters) == ("lfu", 5)

    layout = Layout(home / "store")
    (record,) = list_referrers(layout, response.digest, GOLDEN_TYPE)
    assert json.loads(read_referrer(layout, record.digest))["adapter_rank"] == 8

    plan = await client.plan(neuron_config=CONFIG | {"lora_config": lora}, optimization_level=LEVEL)
    rooms = [rank.lora_bytes for rank in plan.ranks]
    assert rooms == measure_room(manifest)
    assert all(executable.cache == pb.CACHE_RESULT_HIT for executable in plan.executables)

    write_checkpoint(home / "models" / "tuned", seed=1)
    request = pb.ShardWeightsRequest(name="tuned", model="tuned", executables_ref="tiny")
    sharded = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    weights = read_manifest(home, sharded.digest)
    assert weights.graph_abi_digest == manifest.graph_abi_digest
    (own, _), (others, room) = manifest.weight_sets, weights.weight_sets
    assert own != others
    assert room == manifest.weight_sets[1]


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("changes", "item_bytes"),
    [
        ({}, 4),
        ({"quantized": True, "quantization_type": "per_channel_symmetric", "fused_qkv": True}, 4),
        ({"torch_dtype": "bfloat16", "tp_degree": 2}, 2),
    ],
    ids=["plain", "quantized", "bfloat16-pair"],
)
async def test_libraries_with_room(client: Client, home: Path, changes: dict[str, Any], item_bytes: int) -> None:
    """The golden check of a build at level 1 compares a sequence with an adapter, whose input is not quantized."""
    config = CONFIG | {"tp_degree": 1, "lora_config": {"max_lora_rank": 8}} | changes
    response = await client.build(neuron_config=config)
    items = 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    halves = 2 * 8 * (2 * (32 + 16) + 2 * (32 + 8) + 3 * (32 + 32))
    room = measure_room(read_manifest(home, response.digest))
    assert room == ([halves * item_bytes] * 2 if config["tp_degree"] == 2 else [items * item_bytes])
