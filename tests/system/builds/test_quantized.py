"""Bundles of quantized models and KV caches, by real builds: golden checks compare with what quantization leaves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import load_file, save_file

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from compiler_svc.golden.comparison import TOLERANCES
from compiler_svc.records import GOLDEN_TYPE
from runtime_svc.deployments.memory import measure_kept_state, measure_kept_weights
from tests.checkpoints.quantized import TOKEN_WRITERS, WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.running_compiler import Client, response_of
from tests.servers.stack import Stack

pytestmark = pytest.mark.toolchain

CONFIG: Final = {"seq_len": 16, "max_context_length": 8, "quantized": True}
E4M3: Final = {"quantization_dtype": "f8e4m3", "quantization_type": "per_channel_symmetric"}
#: Level, configuration and the dtype of items. Levels, formats, dtypes, caches and ways to divide each come in one.
CASES: Final[dict[str, tuple[int, dict[str, Any], str]]] = {
    "int8": (
        pb.OPTIMIZATION_LEVEL_O1,
        {"activation_quantization_type": "dynamic", "kv_cache_quant": True, "tp_degree": 2},
        "int8",
    ),
    "f8e4m3": (pb.OPTIMIZATION_LEVEL_O0, E4M3 | {"fused_qkv": True, "tp_degree": 2}, "float8_e4m3fn"),
    "f8e5m2": (
        pb.OPTIMIZATION_LEVEL_O1,
        {"quantization_dtype": "f8e5m2", "torch_dtype": "bfloat16", "fused_qkv": True, "tp_degree": 2},
        "float8_e5m2",
    ),
    "f8e4m3-activations": (
        pb.OPTIMIZATION_LEVEL_O1,
        E4M3 | {"activation_quantization_type": "dynamic", "torch_dtype": "bfloat16"},
        "float8_e4m3fn",
    ),
    "int4": (pb.OPTIMIZATION_LEVEL_O1, {"quantization_dtype": "int4"}, "uint8"),
}
SLOW: Final = ("f8e5m2", "f8e4m3-activations")


@pytest.fixture(scope="module")
def models(stack: Stack) -> Path:
    """A folder for checkpoints, with two that are not quantized: `tiny` and `tuned`."""
    path = stack.new_model("tiny")
    write_checkpoint(path)
    write_checkpoint(path.with_name("tuned"), seed=1)
    return path.parent


def read_deviation(layout: Layout, digest: str) -> float:
    """Of logits, relative to the largest, as a bundle's golden check found it."""
    (referrer,) = list_referrers(layout, digest, GOLDEN_TYPE)
    deviation: float = json.loads(read_referrer(layout, referrer.digest))["max_deviation"]
    return deviation


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
async def test_quantized_models_compile(client: Client, layout: Layout, models: Path, name: str) -> None:
    level, config, item = CASES[name]
    fields = {"model": str(models / "tiny"), "neuron_config": CONFIG | config, "optimization_level": level}
    planned = await client.plan(**fields)
    built = await client.build(name=name, **fields)
    manifest = open_bundle(layout, built.digest).manifest
    (shards,) = (one.shards for one in manifest.weight_sets)
    dtypes = {tensor.name: tensor.dtype for tensor in shards[0].tensors}
    assert {dtypes[name] for name in dtypes if name.endswith(".scale")} == {"float32"}
    # Groups of four bits would reach over heads, which have eight dimensions.
    items = {item, "int8"} if item == "uint8" else {item}
    assert {name for name, dtype in dtypes.items() if dtype in items} == {
        f"{name.removesuffix('.scale')}.weight" for name in dtypes if name.endswith(".scale")
    }
    assert dtypes["lm_head.weight"] == item
    if name == "int4":
        assert read_deviation(layout, built.digest) < 1e-3, "activations of 16 bits are more exact than the tolerance"
    kept = [{one.format: one.size_bytes for one in rank.kept_weights} for rank in planned.ranks]
    assert measure_kept_weights(manifest) == sum(map(Counter[str], kept), Counter())
    assert planned.ranks[0].weights_bytes == sum(kept[0].values())
    cache = "float8_e4m3fn" if "kv_cache_quant" in config else config.get("torch_dtype", "float32")
    assert measure_kept_state(manifest) == {cache: planned.ranks[0].kv_bytes * manifest.tp_degree}

    request = pb.ShardWeightsRequest(name="tuned", model=str(models / "tuned"), executables_ref=name)
    tuned = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    other = open_bundle(layout, tuned.digest).manifest
    assert other.graph_abi_digest == manifest.graph_abi_digest
    assert {tensor.name: tensor.dtype for tensor in other.weight_sets[0].shards[0].tensors} == dtypes

    if name == "f8e4m3":
        await check_numbers_that_no_scale_fits(client, layout, models, fields)


async def check_numbers_that_no_scale_fits(
    client: Client, layout: Layout, models: Path, fields: dict[str, Any]
) -> None:
    """A compile and `ShardWeights` name them, and leave nothing of the shards."""
    file = write_checkpoint(models / "invalid") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    save_file(tensors, file)
    blobs = {path: path.stat().st_size for path in (layout.root / "blobs").rglob("*")}
    invalid = {"name": "invalid", "model": str(file.parent)}
    for request in (
        client.compiler.ShardWeights(pb.ShardWeightsRequest(**invalid, executables_ref="f8e4m3")),
        client.compile(**fields | invalid),
    ):
        how = await client.fail(await request, "INVALID_ARGUMENT", "CHECKPOINT_INVALID")
        assert how.fields == {"model.layers.1.mlp.up_proj.weight": "got nan at [2, 3]; accepted: finite numbers"}
        assert {path: path.stat().st_size for path in (layout.root / "blobs").rglob("*")} == blobs
        assert list((layout.root / ".kiln" / "staging").iterdir()) == []


_SCALED: Final = {"direct_cast": False, "quant_dtype": "int8", "k_quant_method": "per_key_symmetric"}
_BLOCKS: Final = {"is_block_kv_layout": True, "pa_num_blocks": 6, "pa_block_size": 8}


@pytest.mark.parametrize(
    ("level", "config", "item"),
    [
        pytest.param(pb.OPTIMIZATION_LEVEL_O1, {"kv_cache_quant": True}, "float8_e4m3fn", marks=pytest.mark.slow),
        (pb.OPTIMIZATION_LEVEL_O0, {"kv_quant_config": _SCALED, "tp_degree": 2} | _BLOCKS, "int8"),
        pytest.param(pb.OPTIMIZATION_LEVEL_O1, {"kv_quant_config": _SCALED} | _BLOCKS, "int8", marks=pytest.mark.slow),
    ],
    ids=["cast", "scaled", "scaled-compiled"],
)
async def test_quantized_caches_compile(
    *, client: Client, layout: Layout, models: Path, level: int, config: dict[str, Any], item: str
) -> None:
    """Their golden checks compare with transformers, which attends to what bytes leave of keys and values."""
    path = write_checkpoint(models / f"{item}-{level}")
    if item == "int8":
        write_scales(path / "model.safetensors")
    plain = {"seq_len": 16, "max_context_length": 8}
    fields = {"model": str(path), "neuron_config": plain | config, "optimization_level": level}
    planned = await client.plan(**fields)
    built = await client.build(name=path.name, **fields)
    manifest = open_bundle(layout, built.digest).manifest
    assert measure_kept_state(manifest) == {item: planned.ranks[0].kv_bytes * manifest.tp_degree}
    assert read_deviation(layout, built.digest) < TOLERANCES["float32"]


def write_scales(path: Path) -> None:
    """Adds scales of keys, one for each of two heads, and of values, one for a layer."""
    tensors = load_file(path)
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        tensors[f"{at}.k_scale"] = np.array([[[0.02]], [[0.03]]], np.float32)
        tensors[f"{at}.v_scale"] = np.array([0.02], np.float32)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "level"),
    [("float", 0), pytest.param("int", 1, marks=pytest.mark.slow), pytest.param("awq", 1, marks=pytest.mark.slow)],
)
async def test_quantized_checkpoints_compile(
    client: Client, layout: Layout, models: Path, name: str, level: int
) -> None:
    """Their golden checks compare with transformers' model, given what the matrices stand for."""
    path = write_checkpoint(models / name)
    writer = TOKEN_WRITERS.get(name) or WRITERS[name]
    writer.rewrite(path)
    fields: dict[str, Any] = {"model": str(path), "neuron_config": {"seq_len": 16, "max_context_length": 8}}
    fields["optimization_level"] = (pb.OPTIMIZATION_LEVEL_O0, pb.OPTIMIZATION_LEVEL_O1)[level]
    planned = await client.plan(**fields)
    built = await client.build(name=name, **fields)
    lost = [warning for warning in built.warnings if "matrices become int8_per_channel, and lose by it" in warning]
    assert len(lost) == (name == "awq")
    manifest = open_bundle(layout, built.digest).manifest
    said = manifest.config["neuron_config"]
    assert (said["quantized"], said["quantization_type"]) == (True, "per_channel_symmetric")
    assert said["modules_to_not_convert"] == ["lm_head"]
    follows = name in TOKEN_WRITERS
    assert said.get("activation_quantization_type") == ("dynamic_whole" if follows else None)
    assert follows == any("activations are quantized, as its quantization_config says" in one for one in built.warnings)
    (shards,) = (one.shards for one in manifest.weight_sets)
    dtypes = {tensor.name: tensor.dtype for tensor in shards[0].tensors}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == (writer.kept or "int8")
    assert "lm_head.weight" not in dtypes, "a tied head that stays as it is shares the table"
    kept = [{one.format: one.size_bytes for one in rank.kept_weights} for rank in planned.ranks]
    assert measure_kept_weights(manifest) == sum(map(Counter[str], kept), Counter())
    assert planned.ranks[0].weights_bytes == sum(kept[0].values())

    # Weights that are not quantized take their places in the same executables.
    request = pb.ShardWeightsRequest(name="tuned", model=str(models / "tuned"), executables_ref=name)
    tuned = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    other = open_bundle(layout, tuned.digest).manifest
    assert other.graph_abi_digest == manifest.graph_abi_digest


@pytest.mark.slow
async def test_weights_of_another_directory_compile(client: Client, layout: Layout, models: Path) -> None:
    """The golden check compares with what these stand for; weights of later requests are those of their own models."""
    path = write_checkpoint(models / "nxd", seed=2)
    WRITERS["nxd"].rewrite(path)
    (path / "config.json").unlink()
    fields = {"neuron_config": CONFIG | {"quantized_checkpoints_path": str(path)}, "name": "elsewhere"}
    model = str(models / "tiny")
    built = await client.build(**fields, model=model, optimization_level=pb.OPTIMIZATION_LEVEL_O0)
    manifest = open_bundle(layout, built.digest).manifest
    assert manifest.config["neuron_config"]["quantization_type"] == "per_channel_symmetric"
    assert read_deviation(layout, built.digest) < TOLERANCES["float32"]
    digests = [shard.blob for one in manifest.weight_sets for shard in one.shards]
    request = pb.ShardWeightsRequest(name="tuned", model=str(models / "tuned"), executables_ref="elsewhere")
    tuned = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    assert digests != [shard.blob for shard in open_bundle(layout, tuned.digest).manifest.shards()]
