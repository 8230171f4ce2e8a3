"""Quantized checkpoints by real builds: what `QuantizeWeights` writes compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import load_file, save_file

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.running_compiler import Client
from tests.servers.stack import Stack

SMALL: Final = {"seq_len": 16, "max_context_length": 8}


@pytest.fixture
def tiny(stack: Stack) -> Path:
    """A plain checkpoint, alone in its folder."""
    return write_checkpoint(stack.new_model("tiny"))


def quantize(client: Client, tiny: Path, **fields: str) -> Any:
    """Writes beside the plain checkpoint. No other test of the compiler has the id of this request."""
    output = str(tiny.with_name("small"))
    return client.compiler.QuantizeWeights(
        pb.QuantizeWeightsRequest(model=str(tiny), output=output, request_id=output, **fields)
    )


def response_of(operation: operations_pb2.Operation) -> pb.QuantizeWeightsResponse:
    response = pb.QuantizeWeightsResponse()
    assert operation.response.Unpack(response), operation.error
    return response


CASES: Final = [
    pytest.param("", "", {}),
    pytest.param("f8e4m3", "nxd", {"fused_qkv": True, "tp_degree": 2}, marks=pytest.mark.slow),
    pytest.param("f8e4m3", "compressed-tensors", {"torch_dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param("f8e5m2", "nxd", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "form", "config"), CASES)
async def test_written_checkpoints_compile(
    *, client: Client, layout: Layout, tiny: Path, dtype: str, form: str, config: dict[str, Any]
) -> None:
    """The golden check compares with transformers' model, given what the matrices stand for."""
    operation = await quantize(client, tiny, dtype=dtype, layout=form)
    events = await client.watch(operation.name)
    end = response_of(await client.finish(operation))
    assert events[-1].checkpoint == end
    path = tiny.with_name("small")
    assert (end.model, end.size_bytes > 0) == (str(path), True)
    assert list(end.warnings) == ["model: not quantized: lm_head"]
    last = [event.progress for event in events if event.HasField("progress")][-1]
    assert (last.name, last.total_bytes) == (str(path), end.size_bytes)
    # Headers are counted, too, as those of shards are.
    assert last.sharded_bytes >= last.total_bytes
    assert (path / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert await quantize(client, tiny, dtype=dtype, layout=form) == await client.get(operation.name)

    level = pb.OPTIMIZATION_LEVEL_O0
    fields: dict[str, Any] = {"neuron_config": SMALL | config, "optimization_level": level}
    built = await client.build(name="small", model=str(path), **fields)
    assert not [warning for warning in built.warnings if "lose by it" in warning]
    manifest = open_bundle(layout, built.digest).manifest
    assert manifest.config["neuron_config"]["quantization_dtype"] == (dtype or "int8")
    (shards,) = (one.shards for one in manifest.weight_sets)
    scales = [tensor for tensor in shards[0].tensors if tensor.name.endswith(".scale")]
    assert len(scales) == (10 if "fused_qkv" in config else 14)


async def test_a_matrix_that_is_not_finite_ends_the_operation(client: Client, tiny: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3, 5] = np.nan
    save_file(tensors, file)
    await client.fail(await quantize(client, tiny), "INVALID_ARGUMENT", "CHECKPOINT_INVALID", name)
    assert [path.name for path in tiny.parent.iterdir()] == ["tiny"]
