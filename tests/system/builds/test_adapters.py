"""Compiles with room for adapters, by real builds."""

import json
import math
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
from tests.servers.running_compiler import Client, response_of
from tests.servers.stack import Stack

CONFIG: dict[str, Any] = {"seq_len": 16, "max_context_length": 8, "tp_degree": 2, "on_device_sampling_config": {}}


@pytest.fixture
def tiny(stack: Stack) -> Path:
    """A checkpoint, alone in its folder."""
    return write_checkpoint(stack.new_model("tiny"))


def measure_room(manifest: Manifest) -> list[int]:
    """Bytes of each rank's adapters."""
    sizes = dict(DTYPES)
    return [
        sum(math.prod(one.shape) * sizes[one.dtype].size_bytes for one in shard.tensors)
        for shard in manifest.shards(mutable=True)
    ]


async def test_a_bundle_has_the_room_that_its_plan_says(client: Client, layout: Layout, tiny: Path) -> None:
    lora = {"max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 5, "eviction_policy": "lfu"}
    fields: dict[str, Any] = {"model": str(tiny), "neuron_config": CONFIG | {"lora_config": lora}}
    fields["optimization_level"] = pb.OPTIMIZATION_LEVEL_O0
    response = await client.build(name="roomy", **fields)
    manifest = open_bundle(layout, response.digest).manifest
    assert [one.name for one in manifest.weight_sets if one.is_mutable] == [ADAPTER_WEIGHTS]
    assert all("adapters" in executable.flags for executable in manifest.executables)
    assert (manifest.serving.adapter_eviction, manifest.serving.max_host_adapters) == ("lfu", 5)

    (record,) = list_referrers(layout, response.digest, GOLDEN_TYPE)
    assert json.loads(read_referrer(layout, record.digest))["adapter_rank"] == 8

    plan = await client.plan(**fields)
    rooms = [rank.lora_bytes for rank in plan.ranks]
    assert rooms == measure_room(manifest)
    assert all(executable.cache == pb.CACHE_RESULT_HIT for executable in plan.executables)

    tuned = write_checkpoint(tiny.with_name("tuned"), seed=1)
    request = pb.ShardWeightsRequest(name="roomy-tuned", model=str(tuned), executables_ref="roomy")
    sharded = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    weights = open_bundle(layout, sharded.digest).manifest
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
async def test_libraries_with_room(
    *, client: Client, layout: Layout, tiny: Path, changes: dict[str, Any], item_bytes: int
) -> None:
    """The golden check of a build at level 1 compares a sequence with an adapter, whose input is not quantized."""
    config = CONFIG | {"tp_degree": 1, "lora_config": {"max_lora_rank": 8}} | changes
    response = await client.build(name="libraries-with-room", model=str(tiny), neuron_config=config)
    items = 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    halves = 2 * 8 * (2 * (32 + 16) + 2 * (32 + 8) + 3 * (32 + 32))
    room = measure_room(open_bundle(layout, response.digest).manifest)
    assert room == ([halves * item_bytes] * 2 if config["tp_degree"] == 2 else [items * item_bytes])
