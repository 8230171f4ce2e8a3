"""Every family reads every form of a checkpoint, and names all tensors at once that do not fit."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

import pytest
import torch
import transformers

from compiler_svc.models.registry import describe_model
from compiler_svc.sharding.plan import find_tied_tensors
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tensors import TensorReader, check_tied_head
from tests.checkpoints.forms import FORMS, copy_in_form
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TinyModel


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    with TensorReader(checkpoint) as reader:
        return {name: reader.read(name).clone() for name in checkpoint.tensors}


def digest_shard(checkpoint: Checkpoint, rank: int) -> str:
    sink = io.BytesIO()
    write_shards(make_plan(checkpoint, tp_degree=2), checkpoint, {rank: sink})
    return hashlib.sha256(sink.getvalue()).hexdigest()


def test_every_form_gives_the_same_shards(tiny: TinyModel, form: str, tmp_path: Path) -> None:
    path = copy_in_form(tiny.checkpoint.path, tmp_path / form, form, read_tensors(tiny.checkpoint))
    checkpoint = Checkpoint.open(path)
    assert [header.name for header in checkpoint.tensors.values()] == list(checkpoint.tensors)
    assert (checkpoint.index is not None, checkpoint.is_pickled) == ("sharded" in form, "pickle" in form)
    for rank in range(2):
        assert digest_shard(checkpoint, rank) == digest_shard(tiny.checkpoint, rank)


def test_what_transformers_ignores_is_ignored(tiny: TinyModel, form: str, tmp_path: Path) -> None:
    description = describe_model(tiny.checkpoint.config)
    layer = description.storage.find_name("model.layers.1.self_attn.x").removesuffix(".x")
    stored = {f"{layer}.{name}": torch.ones(3) for name in ("masked_bias", "rotary_emb.inv_freq")}
    if description.is_tied:
        stored |= {one.name: torch.ones(one.shape) for one in description.head.parameters()}
    path = copy_in_form(tiny.checkpoint.path, tmp_path / form, form, read_tensors(tiny.checkpoint) | stored)
    assert digest_shard(Checkpoint.open(path), 1) == digest_shard(tiny.checkpoint, 1)


def test_heads_are_found_under_the_names_of_checkpoints(tiny: TinyModel, tmp_path: Path) -> None:
    description, tensors = describe_model(tiny.checkpoint.config), read_tensors(tiny.checkpoint)
    head, table = find_tied_tensors(description, tiny.checkpoint)
    assert table in tensors
    assert description.is_tied or head in tensors
    path = copy_in_form(tiny.checkpoint.path, tmp_path / "other", "safetensors", tensors | {head: tensors[table] + 1})
    checkpoint = Checkpoint.open(path)
    if description.is_tied:
        assert digest_shard(checkpoint, 1) == digest_shard(tiny.checkpoint, 1), "shards hold the table"
    with pytest.raises(CheckpointInvalid, match="another matrix, though the head is tied"):
        check_tied_head(checkpoint, head, table)


def test_a_tied_matrix_may_be_stored_as_the_head_alone(tiny: TinyModel, form: str, tmp_path: Path) -> None:
    description, tensors = describe_model(tiny.checkpoint.config), read_tensors(tiny.checkpoint)
    head, table = find_tied_tensors(description, tiny.checkpoint)
    stored = {name: tensor for name, tensor in tensors.items() if name != table} | {head: tensors[table]}
    path = copy_in_form(tiny.checkpoint.path, tmp_path / form, form, stored)
    checkpoint = Checkpoint.open(path)
    if not description.is_tied:
        with pytest.raises(CheckpointInvalid, match=re.escape(f"{table}: got missing")):
            make_plan(checkpoint)
        return
    check_tied_head(checkpoint, *find_tied_tensors(description, checkpoint))
    for rank in range(2):
        assert digest_shard(checkpoint, rank) == digest_shard(tiny.checkpoint, rank)
    architecture = getattr(transformers, tiny.checkpoint.config["architectures"][0])
    loaded = architecture.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(loaded.get_input_embeddings().weight, tensors[table]), "transformers takes it, too"


def test_all_tensors_that_do_not_fit_are_named_at_once(tiny: TinyModel, form: str, tmp_path: Path) -> None:
    tensors = read_tensors(tiny.checkpoint)
    names = sorted(tensors)
    missing, misshapen, integers = names[0], names[1], names[-1]
    shape = list(tensors[misshapen].shape)
    del tensors[missing]
    tensors[misshapen] = torch.ones([*shape[:-1], shape[-1] + 1])
    tensors[integers] = tensors[integers].to(torch.int16)
    adapter = f"{misshapen.rpartition('.')[0]}.lora_A.weight"
    tensors |= {"added.weight": torch.ones(1), adapter: torch.ones(1)}
    path = copy_in_form(tiny.checkpoint.path, tmp_path / form, form, tensors)
    with pytest.raises(CheckpointInvalid) as caught:
        make_plan(Checkpoint.open(path))
    described = {one.field: one.value.partition(":")[0] for one in caught.value.violations}
    assert described == {
        missing: "missing",
        misshapen: f"shape {[*shape[:-1], shape[-1] + 1]}",
        integers: "dtype int16",
        adapter: "unexpected",
    }
    for field, value in described.items():
        assert f"{field}: got {value}" in str(caught.value)
