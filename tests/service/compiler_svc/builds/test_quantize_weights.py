"""Quantized checkpoints by real builds: what `QuantizeWeights` writes compiles, and what it refuses has a name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from google.longrunning import operations_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import load_file, save_file

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from compiler_svc.planning.quantize_admission import MAX_MODULES
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.compiler_process import run_compiler
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client

SMALL: Final = {"seq_len": 16, "max_context_length": 8}


@pytest.fixture
async def client(home: Path) -> AsyncIterator[Client]:
    async with run_compiler(home) as compiler:
        yield compiler.client


def quantize(client: Client, **fields: Any) -> Any:
    defaults = {"model": "tiny", "output": "small"}
    return client.compiler.QuantizeWeights(pb.QuantizeWeightsRequest(**(defaults | fields)))


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


@pytest.mark.parametrize(("dtype", "layout", "config"), CASES)
async def test_written_checkpoints_compile(
    client: Client, home: Path, dtype: str, layout: str, config: dict[str, Any]
) -> None:
    """The golden check compares with transformers' model, given what the matrices stand for."""
    operation = await quantize(client, dtype=dtype, layout=layout, request_id="r")
    events = await client.watch(operation.name)
    end = response_of(await client.finish(operation))
    assert events[-1].checkpoint == end
    path = home / "models" / "small"
    assert (end.model, end.size_bytes > 0) == (str(path), True)
    assert list(end.warnings) == ["model: not quantized: lm_head"]
    last = [event.progress for event in events if event.HasField("progress")][-1]
    assert (last.name, last.total_bytes) == (str(path), end.size_bytes)
    # Headers are counted, too, as those of shards are.
    assert last.sharded_bytes >= last.total_bytes
    assert (path / "tokenizer.json").read_bytes() == (home / "models" / "tiny" / "tokenizer.json").read_bytes()
    assert await quantize(client, dtype=dtype, layout=layout, request_id="r") == await client.get(operation.name)

    level = pb.OPTIMIZATION_LEVEL_O0
    built = await client.build(name="small", model="small", neuron_config=SMALL | config, optimization_level=level)
    assert not [warning for warning in built.warnings if "lose by it" in warning]
    manifest = open_bundle(Layout(home / "store"), built.digest).manifest
    assert manifest.config["neuron_config"]["quantization_dtype"] == (dtype or "int8")
    (shards,) = (one.shards for one in manifest.weight_sets)
    scales = [tensor for tensor in shards[0].tensors if tensor.name.endswith(".scale")]
    assert len(scales) == (10 if "fused_qkv" in config else 14)


async def test_requests_that_are_refused(client: Client, home: Path) -> None:
    refuse = "INVALID_ARGUMENT", "CONFIG_INVALID"
    how = await refused(quantize(client, dtype="int3"), *refuse)
    assert how.fields["dtype"] == "got 'int3'; accepted: int8, f8e4m3, int4"
    how = await refused(quantize(client, dtype="f8e5m2"), *refuse)
    assert how.fields["dtype"].endswith("; or the layout nxd")
    how = await refused(quantize(client, layout="gguf"), *refuse)
    assert how.fields["layout"] == "got 'gguf'; accepted: compressed-tensors or nxd"
    how = await refused(quantize(client, modules_to_not_convert=["a"] * (MAX_MODULES + 1)), *refuse)
    assert how.fields.keys() == {"modules_to_not_convert"}
    for output in ("", ".hidden", "small/..", "a\0b"):
        assert (await refused(quantize(client, output=output), *refuse)).fields.keys() == {"output"}
    await refused(quantize(client, output="tiny"), "ALREADY_EXISTS", "OUTPUT_EXISTS")
    how = await refused(quantize(client, output="none/small"), "FAILED_PRECONDITION", "OUTPUT_REFUSED")
    assert "no such parent directory" in how.fields["output"]
    for output in ("/small", "../small", str(home / "models")):
        how = await refusal(quantize(client, output=output))
        assert (how.reason, [*how.fields]) == ("PATH_OUTSIDE_MODEL_ROOTS", ["output"])
    assert (await refusal(quantize(client, model="nowhere"))).reason == "CHECKPOINT_NOT_FOUND"
    WRITERS["int8-channel"].rewrite(write_checkpoint(home / "models" / "packed"))
    how = await refused(quantize(client, model="packed"), "INVALID_ARGUMENT", "CHECKPOINT_QUANTIZED")
    assert how.fields["model"].startswith("got packed, which is quantized already")
    # Its sizes are no multiples of 128.
    await refused(quantize(client, dtype="int4"), "INVALID_ARGUMENT", "NOTHING_TO_QUANTIZE")
    assert {path.name for path in (home / "models").iterdir()} == {"tiny", "packed"}


async def test_a_matrix_that_is_not_finite_ends_the_operation(client: Client, home: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = home / "models" / "tiny" / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3, 5] = np.nan
    save_file(tensors, file)
    await client.fail(await quantize(client), "INVALID_ARGUMENT", "CHECKPOINT_INVALID", name)
    assert {path.name for path in (home / "models").iterdir()} == {"tiny"}
