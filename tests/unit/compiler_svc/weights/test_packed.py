"""Quantized checkpoints: what their matrices stand for, and what of them is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compiler_svc.models.transforms import INT4, ModelChanges, Quantization
from compiler_svc.planning.checkpoint_quantization import list_plain, read_quantization, warn_of_other_bits
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import TensorReader, check_finite
from execution.quantized_linear import dequantize
from tests.checkpoints.quantized import KEPT_GROUPS, WRITERS, Writer
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.config.resolving import resolve
from tests.unit.compiler_svc.sharding.test_ranks import NUM_PROMPT_TOKENS, TOKENS, generate_together

#: Sizes that groups of 16 divide and blocks of 48 x 32 do not.
ATTRIBUTES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
DOWN = "model.layers.1.mlp.down_proj"


def write_quantized(path: Path, writer: Writer | str, attributes: dict[str, Any] = ATTRIBUTES) -> TinyModel:
    """A checkpoint in one of the ways, and transformers' model with what its matrices stand for."""
    tiny = write_tiny_model(path, attributes)
    meant = (WRITERS[writer] if isinstance(writer, str) else writer).rewrite(path)
    tiny.model.load_state_dict(meant)
    return TinyModel(tiny.model, Checkpoint.open(path))


@pytest.mark.parametrize("name", WRITERS)
def test_matrices_stand_for_what_the_writer_says(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, ATTRIBUTES)
    before = load_file(tmp_path / "model.safetensors")
    meant = WRITERS[name].rewrite(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == meant.keys()
    assert list_plain(checkpoint) == ["lm_head"]
    with TensorReader(checkpoint) as reader:
        for tensor, values in meant.items():
            read = reader.read(tensor)
            torch.testing.assert_close(read.float(), values.float(), rtol=1e-6, atol=1e-7)
            assert tuple(read.shape) == checkpoint.tensors[tensor].shape == tuple(before[tensor].shape)
            if tensor in checkpoint.packed:
                assert not torch.equal(read, before[tensor])
                matrix = reader.unpack(tensor)
                assert matrix is not None
                # Rows that begin and end within an int32.
                torch.testing.assert_close(matrix.read_rows(3, 13), read[3:13], rtol=0, atol=0)
    check_finite(checkpoint)


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("name", WRITERS)
def test_models_with_dense_matrices(name: str, tp_degree: int, tmp_path: Path) -> None:
    tiny = write_quantized(tmp_path, name)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for outputs in generate_together(tiny, tiny.spec(tp_degree=tp_degree)):
        assert deviation(outputs["logits"], expected) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if writer.kept not in {None, "uint8"}])
def test_items_stay_as_they_are_where_a_kernel_has_them(name: str, tmp_path: Path) -> None:
    tiny = write_quantized(tmp_path, name)
    config = read_quantization(tiny.checkpoint, "cpu")
    assert config["quantized"]
    format_name = f"{config['quantization_dtype']}_per_channel"
    quantization = Quantization(format=format_name, skipped=config["modules_to_not_convert"])
    description = ModelChanges(fuses_qkv=True, quantization=quantization).apply(tiny.checkpoint.description)
    shard = load_shard(tiny.plan(description=description), tiny.checkpoint)
    stored = load_file(tmp_path / "model.safetensors")
    assert shard[f"{DOWN}.weight"].dtype == getattr(torch, WRITERS[name].kept or "")
    items = stored.get(f"{DOWN}.weight", stored.get(f"{DOWN}._weight_qdata"))
    assert items is not None
    assert torch.equal(shard[f"{DOWN}.weight"].view(torch.uint8), items.view(torch.uint8))
    named = {f"{DOWN}.{kind}" for kind in ("weight_scale", "scale", "_weight_scale")}
    (scales,) = (one for name, one in stored.items() if name in named)
    assert torch.equal(shard[f"{DOWN}.scale"], scales.flatten().expand(64))
    assert shard["lm_head.weight"].dtype == torch.float32
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for outputs in generate_together(tiny, tiny.spec(tp_degree=2, description=description)):
        assert deviation(outputs["logits"], expected) < TOLERANCE


@pytest.mark.parametrize("name", KEPT_GROUPS)
def test_four_bits_stay_as_they_are(name: str, tmp_path: Path) -> None:
    wide = ATTRIBUTES | {"hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 512}
    size, writer = KEPT_GROUPS[name]
    tiny = write_quantized(tmp_path, writer, wide)
    values = read_quantization(tiny.checkpoint, "cpu")
    format_name = INT4 if size == 128 else f"int4_by_{size}"
    assert (values["quantized"], values["quantization_dtype"]) == (True, format_name)
    assert warn_of_other_bits(tiny.checkpoint, resolve(**values).config.neuron_config) == ()
    quantization = Quantization(format=format_name, skipped=values["modules_to_not_convert"])
    description = ModelChanges(fuses_qkv=True, quantization=quantization).apply(tiny.checkpoint.description)
    shard = load_shard(tiny.plan(description=description), tiny.checkpoint)
    left = dequantize(shard[f"{DOWN}.weight"], shard[f"{DOWN}.scale"])
    torch.testing.assert_close(left, tiny.model.get_parameter(f"{DOWN}.weight"), rtol=1e-6, atol=1e-6)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for tp_degree in (1, 2):
        (outputs, *_) = generate_together(tiny, tiny.spec(tp_degree=tp_degree, description=description))
        assert deviation(outputs["logits"], expected) < TOLERANCE


def test_layers_whose_heads_hold_no_group_are_named(tmp_path: Path) -> None:
    """With heads of 16 dimensions, the output layer cannot stay int4, nor can one with 80 inputs."""
    checkpoint = write_quantized(tmp_path, "int4-channel").checkpoint
    config = resolve(**read_quantization(checkpoint, "cpu")).config.neuron_config
    (warning,) = warn_of_other_bits(checkpoint, config)
    assert warning == "model: 4 of 14 quantized matrices become int8_per_channel, and lose by it"


def test_ranks_do_not_divide_groups(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, ATTRIBUTES | {"intermediate_size": 128})
    description = ModelChanges(quantization=Quantization(format=INT4)).apply(tiny.checkpoint.description)
    with pytest.raises(ShardingNotServed) as caught:
        tiny.plan(description=description, tp_degree=2)
    assert "neuron_config.tp_degree: got 2 with intermediate_size 128" in str(caught.value)
    assert "whole groups of 128" in str(caught.value)


def test_one_scale_stays_one(tmp_path: Path) -> None:
    tiny = write_quantized(tmp_path, "int8-tensor")
    quantization = Quantization(format="int8_per_tensor", skipped=("lm_head",))
    description = ModelChanges(quantization=quantization).apply(tiny.checkpoint.description)
    shard = load_shard(tiny.plan(description=description), tiny.checkpoint)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(shard[f"{DOWN}.weight"], stored[f"{DOWN}.weight"])
    assert torch.equal(shard[f"{DOWN}.scale"], stored[f"{DOWN}.weight_scale"].flatten())


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if not writer.kept])
def test_other_bits_become_int8(name: str, tmp_path: Path) -> None:
    tiny = write_quantized(tmp_path, name)
    values = read_quantization(tiny.checkpoint, "cpu")
    assert (values["quantized"], values["quantization_dtype"]) == (True, "int8")
    config = resolve(**values).config.neuron_config
    (warning,) = warn_of_other_bits(tiny.checkpoint, config)
    assert warning == "model: 14 of 14 quantized matrices become int8_per_channel, and lose by it"
    quantization = Quantization(format="int8_per_channel", skipped=("lm_head",))
    description = ModelChanges(quantization=quantization).apply(tiny.checkpoint.description)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    (outputs,) = generate_together(tiny, tiny.spec(description=description))
    assert TOLERANCE / 10 < deviation(outputs["logits"], expected) < 0.05


def test_what_a_person_says_comes_first(tmp_path: Path) -> None:
    checkpoint = write_quantized(tmp_path, "int8-channel").checkpoint
    config = resolve(quantized=False).config.neuron_config
    (warning,) = warn_of_other_bits(checkpoint, config)
    assert warning == "model: 14 of 14 quantized matrices become bfloat16; neuron_config.quantized keeps them small"
    assert read_quantization(checkpoint, "trn2") == read_quantization(checkpoint, "cpu"), "wherever it is compiled"
