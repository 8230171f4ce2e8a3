"""Text models inside of models that take images: served as the family's own, and the rest is left out by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bundle.errors import KilnError
from compiler_svc.config import InferenceConfig, resolve_config
from compiler_svc.config.document import parse_document
from compiler_svc.config.interchange import to_neuron_config_json
from compiler_svc.golden.reference import Reference
from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.registry import describe_model, list_nested_families
from compiler_svc.planning.admission import warn_of_parts_left_out
from compiler_svc.planning.model_overrides import keep_changes, override_model
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.inventory import set_surplus_aside
from tests.checkpoints.nested_models import NESTED, write_nested_model
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation
from tests.unit.compiler_svc.sharding.test_ranks import (
    NUM_PROMPT_TOKENS,
    TOKENS,
    check_against_transformers,
)

#: What transformers 4.52 and later call modules in memory, and what they and earlier ones store.
IN_MEMORY = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head": "lm_head",
    "vision_tower": "model.vision_tower",
    "multi_modal_projector": "model.multi_modal_projector",
}


@pytest.fixture(scope="module", params=sorted(NESTED))
def nested(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_nested_model(tmp_path_factory.mktemp("model"), request.param)


def rewrite(tiny: TinyModel, path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """The checkpoint with another `config.json` and other tensors."""
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(path)


def read_tensors(tiny: TinyModel) -> dict[str, torch.Tensor]:
    return load_file(tiny.checkpoint.path / "model.safetensors")


def override(checkpoint: Checkpoint, **document: Any) -> tuple[Checkpoint, InferenceConfig]:
    given = resolve_config(document, checkpoint_dtype=None).config
    changes, _ = keep_changes(checkpoint, given.model_attributes, given.attribute_map)
    given = replace(given, model_attributes=changes)
    return override_model(checkpoint, given), given


def test_every_architecture_is_shown() -> None:
    assert NESTED.keys() == list_nested_families().keys()


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_text_is_what_transformers_computes(nested: TinyModel, tp_degree: int) -> None:
    check_against_transformers(nested, tp_degree)


def test_names_of_modules_in_memory_are_read(nested: TinyModel, tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in read_tensors(nested).items():
        old, new = next(pair for pair in IN_MEMORY.items() if name.startswith(pair[0]))
        tensors[new + name.removeprefix(old)] = tensor
    checkpoint = rewrite(nested, tmp_path, dict(nested.checkpoint.whole_config), tensors)
    check_against_transformers(TinyModel(nested.model, checkpoint), 1)


def test_golden_checks_of_builds_have_a_reference(nested: TinyModel) -> None:
    logits = torch.stack([*Reference(nested.checkpoint, torch.float32).run(TOKENS, NUM_PROMPT_TOKENS)])
    assert deviation(logits, nested.step_logits(TOKENS, NUM_PROMPT_TOKENS)) < TOLERANCE


def test_parts_for_images_are_left_out_and_named(nested: TinyModel) -> None:
    planned = {one.name for one in nested.plan().tensors}
    assert not any("vision" in name or "projector" in name for name in planned)
    counts = {
        part: sum(name.startswith(f"{part}.") for name in nested.checkpoint.tensors)
        for part in ("vision_tower", "multi_modal_projector")
    }
    (warning,) = warn_of_parts_left_out(nested.checkpoint)
    assert all(f"{part} ({count} tensors)" in warning for part, count in counts.items())
    assert min(counts.values()) > 0


def test_no_other_tensor_is_left_out(nested: TinyModel, tmp_path: Path) -> None:
    tensors = read_tensors(nested) | {"vision_towers.weight": torch.zeros(3), "model.audio.weight": torch.zeros(3)}
    checkpoint = rewrite(nested, tmp_path, dict(nested.checkpoint.whole_config), tensors)
    surplus = set_surplus_aside(checkpoint).surplus
    assert {one.header.name for one in surplus} == {"vision_towers.weight", "model.audio.weight"}


def test_attributes_of_the_text_model_are_replaced_wherever_a_document_has_them(nested: TinyModel) -> None:
    at_top, _ = override(nested.checkpoint, sliding_window=5)
    inside, changes = override(nested.checkpoint, text_config={"sliding_window": 5, "hidden_size": 64})
    assert changes.model_attributes == {"sliding_window": 5}
    assert describe_model(at_top.config) == describe_model(inside.config) != describe_model(nested.checkpoint.config)
    reference = Reference(at_top, torch.float32)
    assert reference._model.config.text_config.sliding_window == 5


def test_a_document_that_repeats_the_file_changes_nothing(nested: TinyModel) -> None:
    repeated = {name: value for name, value in nested.checkpoint.whole_config.items() if name != "dtype"}
    _, changes = override(nested.checkpoint, **repeated)
    assert changes.model_attributes == {}


def test_the_configuration_that_a_bundle_has_changes_nothing(nested: TinyModel) -> None:
    _, config = override(nested.checkpoint, sliding_window=5)
    saved = parse_document(to_neuron_config_json(config, nested.checkpoint.config))
    checkpoint, again = override(nested.checkpoint, **saved)
    assert again.model_attributes == {"sliding_window": 5}
    assert describe_model(checkpoint.config).layers[0].attention.state.window == 5


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"text_config": 3}, ModelConfigInvalid, "text_config"),
        ({"text_config": {"model_type": "qwen2"}}, ModelNotServed, "text_config.model_type"),
        ({"text_config": {"hidden_size": "64"}}, ModelConfigInvalid, "hidden_size"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, ModelNotServed, "quantization_config.quant_method"),
        ({"quantization_config": {"bits": 4}}, ModelNotServed, "quantization_config.quant_method"),
    ],
)
def test_mistakes_are_named(
    nested: TinyModel, tmp_path: Path, changes: dict[str, Any], error: type[KilnError], field: str
) -> None:
    config = dict(nested.checkpoint.whole_config)
    for name, value in changes.items():
        config[name] = config[name] | value if name == "text_config" and isinstance(value, dict) else value
    checkpoint = rewrite(nested, tmp_path, config, {"x": torch.zeros(1)})
    with pytest.raises(error) as caught:
        describe_model(checkpoint.config)
    assert caught.value.violations[0].field == field


def test_the_published_file_of_4b_leaves_out_transformers_defaults(tmp_path: Path) -> None:
    """The attributes that google/gemma-3-4b-it has, with a model of other sizes."""
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    description = describe_model(checkpoint.config)
    tensors = description.checkpoint_tensors()
    assert tensors["language_model.model.embed_tokens.weight"] == (262_208, 2560)
    assert tensors["language_model.model.layers.33.self_attn.k_proj.weight"] == (1024, 2560)
    assert description.is_tied
    assert description.states[0].window == 1024
    assert description.states[5].window is None
    assert checkpoint.config["eos_token_id"] == [1, 106]
