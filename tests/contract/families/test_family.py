"""What every family promises: it reads what counts, describes what the checkpoint stores, and its ranks agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiler_svc.golden.reference import Reference
from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.registry import describe_model, find_family, list_attributes, list_families
from compiler_svc.models.token_ids import read_token_ids
from compiler_svc.models.transforms import fuse_qkv
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation
from tests.contract.families.geometries import Geometry
from tests.ranks.stepping import run_exported
from tests.unit.compiler_svc.sharding.test_ranks import (
    NUM_PROMPT_TOKENS,
    TOKENS,
    check_against_transformers,
    generate_together,
)


def test_every_family_is_shown() -> None:
    assert FAMILIES.keys() == list_families().keys()
    assert all(len(family.geometries) >= 3 and family.parity for family in FAMILIES.values())


def test_the_attributes_that_count_are_those_that_are_read(tiny: TinyModel) -> None:
    class Recorded(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            read.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    read: set[str] = set()
    # The attributes of layers that slide are read if layers may slide, and theta if the embedding has none of its own.
    config = dict(tiny.checkpoint.config) | {"use_sliding_window": True, "sliding_window": 8}
    share = {
        name: value for name, value in config.get("rope_parameters", {}).items() if name == "partial_rotary_factor"
    }
    for one in (config, config | {"rope_parameters": share or None}):
        recorded = Recorded(one)
        read_token_ids(recorded, {}, describe_model(recorded).vocab_size)
    # The type only stands in for an architecture that is missing.
    assert read - {"model_type"} | {"dtype", "torch_dtype"} == list_attributes(config)


def test_defaults_are_those_of_transformers(geometry: Geometry, tiny: TinyModel) -> None:
    family, shown = find_family({"architectures": [geometry.architecture]}), FAMILIES[geometry.architecture]
    # As many heads as KV heads by default in any family, and as large as dimensions are rotated by default.
    large = {family.names.list_names("num_attention_heads")[0]: 32, family.names.list_names("hidden_size")[0]: 2048}
    given = {name: tiny.checkpoint.config[name] for name in shown.required} | large
    reference = type(tiny.model).config_class(**given)
    config = describe_model(given | {"architectures": [geometry.architecture]}).numeric_config
    own = {name: (*family.names.list_names(name), "")[0] for name in config}
    compared = [field for field, name in own.items() if name and hasattr(reference, name)]
    assert len(compared) >= len(shown.required) + shown.num_defaults
    for field in compared:
        expected = getattr(reference, own[field])
        is_derived = expected is None and own[field] in {"head_dim", "n_inner"}
        assert config[field] == expected or is_derived, field


def test_attributes_that_shape_the_weights_are_required(geometry: Geometry, tiny: TinyModel) -> None:
    for name in FAMILIES[geometry.architecture].required:
        config = {key: value for key, value in tiny.checkpoint.config.items() if key != name}
        with pytest.raises(ModelConfigInvalid) as caught:
            describe_model(config)
        assert caught.value.violations[0].field == name
        assert f"must define {name}" in str(caught.value)


def test_description_is_what_the_checkpoint_stores(tiny: TinyModel) -> None:
    description = describe_model(tiny.checkpoint.config)
    expected = {name: header.shape for name, header in tiny.checkpoint.tensors.items()}
    assert description.checkpoint_tensors() == expected
    for tp_degree in (1, 2, 4):
        tiny.plan(tp_degree=tp_degree)


@pytest.mark.parametrize("tp_degree", [2, 4])
def test_ranks_compute_what_transformers_computes(tiny: TinyModel, tp_degree: int) -> None:
    check_against_transformers(tiny, tp_degree)


def test_exported_graphs_serve_every_rank(tiny: TinyModel) -> None:
    check_against_transformers(tiny, 2, run_exported)


def test_bfloat16_is_about_as_near_to_float32_as_transformers_is(
    geometry: Geometry, tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    truth = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    reference = type(tiny.model).from_pretrained(tiny.checkpoint.path, dtype=torch.bfloat16).eval()
    theirs = deviation(TinyModel(reference, tiny.checkpoint).step_logits(TOKENS, NUM_PROMPT_TOKENS), truth)
    spec = tiny.spec(dtype="bfloat16")
    for outputs in generate_together(tiny, spec):
        assert 0 < deviation(outputs["logits"], truth) < 2 * theirs


def test_golden_checks_of_builds_have_a_reference(tiny: TinyModel) -> None:
    logits = torch.stack([*Reference(tiny.checkpoint, torch.float32).run(TOKENS, NUM_PROMPT_TOKENS)])
    assert deviation(logits, tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)) < TOLERANCE


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_one_projection_may_make_queries_keys_and_values(tiny: TinyModel, tp_degree: int) -> None:
    description = fuse_qkv(describe_model(tiny.checkpoint.config))
    tensors = {parameter.name for parameter in description.parameters(tp_degree)}
    assert "model.layers.0.self_attn.qkv_proj.weight" in tensors
    assert not any("q_proj" in name for name in tensors)
    check_against_transformers(tiny, tp_degree, description=description)
