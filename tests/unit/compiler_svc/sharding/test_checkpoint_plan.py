"""Quantized checkpoints that we write: they hold what a compile of the plain one makes, and others read the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from bundle.abi.formats import FORMATS
from compiler_svc.models.transforms import ModelChanges, Quantization
from compiler_svc.planning.checkpoint_quantization import list_plain, read_quantization
from compiler_svc.sharding.checkpoint_layouts import LAYOUTS
from compiler_svc.sharding.checkpoint_plan import CheckpointPlan, plan_checkpoint, warn_of_plain
from compiler_svc.sharding.errors import CheckpointQuantized, NothingToQuantize
from compiler_svc.sharding.writer import CHECKPOINT_FILE, write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from execution.quantized_linear import dequantize
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.ranks.stepping import load_shard

#: Heads and sizes that groups of 128 divide; outputs that are no whole int32 of zero points.
ATTRIBUTES: Final = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "vocab_size": 131,
}
DOWN: Final = "model.layers.1.mlp.down_proj"
CASES: Final = [(layout, dtype) for layout, row in LAYOUTS.items() for dtype in row.schemes]


def write(tiny: TinyModel, path: Path, plan: CheckpointPlan) -> Checkpoint:
    """Writes what the plan says of weights and configuration."""
    path.mkdir()
    for name, file in plan.files.items():
        with (path / name).open("wb") as sink:
            write_shards(file, tiny.checkpoint, {0: sink}, form=CHECKPOINT_FILE)
    (path / "config.json").write_text(json.dumps(dict(tiny.checkpoint.whole_config) | dict(plan.config)))
    if plan.index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(plan.index))
    return Checkpoint.open(path)


def load(path: Path) -> dict[str, Tensor]:
    return {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


def shard(tiny: TinyModel, checkpoint: Checkpoint, format_name: str, skipped: tuple[str, ...]) -> Mapping[str, Tensor]:
    """What a compile makes of a checkpoint."""
    quantization = Quantization(format=format_name, skipped=skipped)
    description = ModelChanges(quantization=quantization).apply(checkpoint.description)
    return load_shard(TinyModel(tiny.model, checkpoint).plan(description=description), checkpoint)


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_written_checkpoints_are_what_compiles_make(layout: str, dtype: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES)
    written = write(tiny, tmp_path / "written", plan_checkpoint(tiny.checkpoint, dtype, layout))
    said = read_quantization(written, "cpu")
    assert (said["quantized"], said["quantization_dtype"]) == (True, dtype)
    assert said["modules_to_not_convert"] == (("lm_head",) if layout == "compressed-tensors" else ())
    expected = shard(tiny, tiny.checkpoint, LAYOUTS[layout].schemes[dtype].format, said["modules_to_not_convert"])
    read = shard(tiny, written, LAYOUTS[layout].schemes[dtype].format, said["modules_to_not_convert"])
    assert expected.keys() == read.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == read[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), read[name].view(torch.uint8)), name
    assert expected[f"{DOWN}.weight"].dtype == getattr(torch, FORMATS[LAYOUTS[layout].schemes[dtype].format].item)


@pytest.mark.parametrize("dtype", LAYOUTS["compressed-tensors"].schemes)
def test_compressed_tensors_reads_the_same(dtype: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES)
    write(tiny, tmp_path / "written", plan_checkpoint(tiny.checkpoint, dtype, "compressed-tensors"))
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "written" / "config.json").read_text())["quantization_config"]
    )
    (scheme,) = config.config_groups.values()
    stored = load(tmp_path / "written")
    compressor = BaseCompressor.get_value_from_registry(config.format)
    assert set(compressor.compression_param_names(scheme)) == {
        name.removeprefix(f"{DOWN}.") for name in stored if name.startswith(DOWN)
    }
    row = LAYOUTS["compressed-tensors"].schemes[dtype].format
    expected = shard(tiny, tiny.checkpoint, row, ("lm_head",))
    for module in (DOWN, "model.layers.0.self_attn.q_proj"):
        state = {name.removeprefix(f"{module}."): one for name, one in stored.items() if name.startswith(f"{module}.")}
        left = compressor.decompress(state, scheme)["weight"]
        torch.testing.assert_close(
            left.float(), dequantize(expected[f"{module}.weight"], expected[f"{module}.scale"]), rtol=1e-6, atol=1e-7
        )
    assert config.ignore == ["lm_head"]


def test_what_is_not_quantized_stays_bit_by_bit(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES, dtype=torch.bfloat16)
    plan = plan_checkpoint(tiny.checkpoint, "int8", "compressed-tensors", ("self_attn", "layers.0.mlp"))
    write(tiny, tmp_path / "written", plan)
    before, after = load(tmp_path / "plain"), load(tmp_path / "written")
    kept = before.keys() & after.keys() - {f"model.layers.1.mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    assert len(before) - len(kept) == 3
    for name in kept:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])
    (warning,) = warn_of_plain(plan.plain)
    assert "model.layers.{0-1}.self_attn.q_proj" in warning
    assert "model.layers.0.mlp.up_proj" in warning
    assert "lm_head" in warning


def test_a_tied_head_shares_the_table(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES | {"tie_word_embeddings": True})
    written = write(tiny, tmp_path / "written", plan_checkpoint(tiny.checkpoint, "int8", "nxd"))
    assert list_plain(written) == ["lm_head"]
    assert torch.equal(
        load(tmp_path / "plain")["model.embed_tokens.weight"], load(tmp_path / "written")["model.embed_tokens.weight"]
    )


def test_files_are_of_bounded_size(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES)
    plan = plan_checkpoint(tiny.checkpoint, "int8", "compressed-tensors", max_file_bytes=200_000)
    assert len(plan.files) > 3
    written = write(tiny, tmp_path / "written", plan)
    assert sorted(file.name for file in written.files) == sorted(plan.files)
    whole = write(tiny, tmp_path / "whole", plan_checkpoint(tiny.checkpoint, "int8", "compressed-tensors"))
    assert whole.tensors.keys() == written.tensors.keys()
    for name, tensor in load(tmp_path / "whole").items():
        assert torch.equal(tensor, load(tmp_path / "written")[name])


@pytest.mark.parametrize(("layout", "dtype"), [("compressed-tensors", "int4"), ("nxd", "f8e4m3")])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_matrices_that_are_not_finite_are_named(layout: str, dtype: str, value: float, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES)
    tiny.model.get_parameter(f"{DOWN}.weight").data[3, 200] = value
    tiny.model.save_pretrained(tmp_path / "plain")
    plan = plan_checkpoint(tiny.checkpoint, dtype, layout)
    with pytest.raises(CheckpointInvalid) as caught:
        write(tiny, tmp_path / "written", plan)
    assert f"{DOWN}.weight: got {value} at [3, 200]; accepted: finite numbers" in str(caught.value)


def test_what_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "plain", ATTRIBUTES | {"hidden_size": 96, "intermediate_size": 160})
    with pytest.raises(NothingToQuantize, match="plain, of which int4 would quantize no linear layer"):
        plan_checkpoint(tiny.checkpoint, "int4", "compressed-tensors")
    with pytest.raises(NothingToQuantize):
        plan_checkpoint(tiny.checkpoint, "int8", "compressed-tensors", ("model",))
    written = write(tiny, tmp_path / "written", plan_checkpoint(tiny.checkpoint, "int8", "nxd"))
    with pytest.raises(CheckpointQuantized, match="written, which is quantized already"):
        plan_checkpoint(written, "int8", "nxd")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    del tensors[f"{DOWN}.weight"]
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=f"{DOWN}.weight: got missing"):
        plan_checkpoint(Checkpoint.open(tmp_path / "plain"), "int8", "nxd")


def test_matrices_that_lie_the_other_way_stay(tmp_path: Path) -> None:
    """GPT-2's are [inputs, outputs], for which no quantized checkpoint has a form."""
    tiny = write_tiny_model(
        tmp_path / "plain", {"n_embd": 128, "n_layer": 1, "n_head": 2}, architecture="GPT2LMHeadModel"
    )
    with pytest.raises(NothingToQuantize):
        plan_checkpoint(tiny.checkpoint, "int8", "nxd")
