"""Quantized weights for trn2, by doubles of Neuron's packages, on cores that the stand-in for libnrt pretends to be."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.abi.tensor import DTYPES
from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.checkpoints.random_weights import CONFIG as MODEL
from tests.checkpoints.random_weights import write_checkpoint
from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.servers.running_compiler import Client
from tests.servers.stack import Stack

__all__ = ["nrt_library"]

CONFIG: Final[dict[str, Any]] = {
    "seq_len": 32,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
    "quantized": True,
}
CHANNELS: Final = {"quantization_type": "per_channel_symmetric", "torch_dtype": "bfloat16"}
E5M2: Final = CHANNELS | {"quantization_dtype": "f8e5m2", "modules_to_not_convert": ["lm_head"]}
#: Of the model's layers and head.
NUM_MATRICES: Final = 7 * MODEL["num_hidden_layers"] + 1
#: What is set beside, the dtypes of items and of the KV cache, how many matrices have items, and whether neuronx-cc
#: reads some as another float.
Case = tuple[dict[str, Any], str, str, int, bool]
CASES: Final[tuple[Case, ...]] = (
    ({"kv_cache_quant": True}, "int8", "float8_e4m3fn", NUM_MATRICES, True),
    (CHANNELS | {"quantization_dtype": "f8e4m3"}, "float8_e4m3fn", "bfloat16", NUM_MATRICES, True),
    (E5M2, "float8_e5m2", "bfloat16", NUM_MATRICES - 1, False),
)
TAGS: Final = ("context_encoding_8", "token_generation_32")


@pytest.mark.parametrize("cases", [CASES[:1], pytest.param(CASES[1:], marks=pytest.mark.slow)], ids=["one", "others"])
async def test_items_and_scales_are_compiled_for_and_loaded(
    *,
    cases: Sequence[Case],
    client: Client,
    stack: Stack,
    layout: Layout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nrt_library: Path,
) -> None:
    model = str(write_checkpoint(stack.new_model("tiny")))
    bundles = []
    with stack.ordering_neuronx_cc({"answers": dict.fromkeys(TAGS, [0.0] * MODEL["vocab_size"])}):
        for changes, item, kept, num_quantized, is_cast in cases:
            target = pb.Target(kind=pb.Target.KIND_TRN2)
            fields = {"model": model, "neuron_config": CONFIG | changes, "target": target}
            planned = await client.plan(**fields)
            built = await client.build(name="quantized-neffs", **fields)
            bundles.append(open_bundle(layout, built.digest))
            size_bytes = check_manifest(bundles[-1].manifest, item, num_quantized, is_cast=is_cast)
            assert {tensor.dtype for tensor in bundles[-1].manifest.state.tensors} == {kept}
            taken = [one for one in bundles[-1].manifest.executables[0].neff.inputs if one.kind == "state"]
            assert {one.dtype for one in taken} == {kept}
            assert planned.ranks[0].weights_bytes == size_bytes
    # A host that the compiler did not see.
    for name, value in make_environment(nrt_library, tmp_path / "host").items():
        monkeypatch.setenv(name, value)
    with RankForkservers() as forkservers:
        for bundle in bundles:
            group = await RankGroup.start(
                bundle.manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open, cores=(0,)
            )
            try:
                await group.load()
                await group.warm_up()
            finally:
                await group.close()


def check_manifest(manifest: Manifest, item: str, num_quantized: int, *, is_cast: bool) -> int:
    """Shards and NEFFs have the items and scales of so many matrices; returns the bytes of the weights."""
    ((shard,),) = (one.shards for one in manifest.weight_sets)
    tensors = {tensor.name: tensor for tensor in shard.tensors}
    quantized = {name.removesuffix(".scale") for name in tensors if name.endswith(".scale")}
    assert len(quantized) == num_quantized
    assert {tensors[f"{name}.weight"].dtype for name in quantized} == {item}
    assert {tensors[f"{name}.scale"].dtype for name in quantized} == {"float32"}
    for executable in manifest.executables:
        assert executable.neff is not None
        taken = {one.tensor: one.dtype for one in executable.neff.inputs if one.kind == "weight"}
        assert {taken[f"{name}.weight"] for name in quantized} == {item}
        assert {taken[f"{name}.scale"] for name in quantized} == {"float32"}
        assert ("fp8e4m3fn-as-fp8e4m3" in " ".join(executable.neff.compiler_flags)) == is_cast
    return sum(prod(tensor.shape) * DTYPES[tensor.dtype].size_bytes for tensor in tensors.values())
