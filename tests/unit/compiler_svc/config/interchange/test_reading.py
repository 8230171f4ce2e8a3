"""NxD Inference's files, and the values in them that documents do not have."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from compiler_svc.config import Resolution, parse_document, resolve_config
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from tests.repository import ROOT

#: As NxD Inference 0.9 writes it.
SAVED = ROOT / "tests/system/configs/neuron_config.json"


def read_saved(**neuron_config: Any) -> dict[str, Any]:
    document = parse_document(SAVED.read_text())
    document["neuron_config"] |= neuron_config
    return document


def resolve(document: dict[str, Any], target: Any = "cpu") -> Resolution:
    return resolve_config(document, checkpoint_dtype=None, target=target)


def mistakes_in(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigInvalid) as caught:
        resolve(document, "trn2")
    return {violation.field: violation.accepted for violation in caught.value.violations}


def test_a_whole_file() -> None:
    assert math.isinf(json.loads(SAVED.read_text())["neuron_config"]["quantize_clamp_bound"])
    resolution = resolve(read_saved())
    neuron_config: Any = resolution.config.neuron_config
    assert (neuron_config.torch_dtype, neuron_config.max_new_tokens) == ("float32", None)
    assert neuron_config.context_encoding_buckets == (64, 128)
    assert neuron_config.on_device_sampling_config.global_topk == 64
    assert resolution.config.fused_spec_config is None
    assert resolution.config.model_attributes["rope_theta"] == 10000.0
    assert resolution.config.model_attributes["rope_scaling"] is None
    metadata, foreign, *notes = resolution.warnings
    assert metadata == "metadata: it is for NxD Inference only, and kept nowhere"
    assert foreign == (
        "config: ignored, because no model here has attributes of these names: 'output_router_aux_weight'"
    )
    assert notes[-1].startswith("neuron_config: no document names on_cpu, ")
    assert not any("overrides_torch_dtype" in note or "is_prefill_stage" in note for note in notes)


def test_only_the_first_of_many_foreign_names_are_told() -> None:
    warnings = resolve(read_saved() | {f"foreign_{number:03}": 0 for number in range(300)}).warnings
    (warning,) = [warning for warning in warnings if "'foreign_015'" in warning]
    assert warning.endswith("'foreign_015', …")


def test_what_is_derived_may_have_any_value() -> None:
    derived = {"kv_cache_tiling": True, "tile_cc": True, "buckets": [64], "enable_long_context_mode": True}
    assert resolve(read_saved(**derived)).config == resolve(read_saved()).config


def test_what_is_not_derived_may_not() -> None:
    with pytest.raises(FeatureNotServed, match=r"neuron_config\.cp_degree"):
        resolve(read_saved(cp_degree=2))


def test_names_that_are_none_are_mistakes_where_nobody_saved_them() -> None:
    assert "did you mean 'rope_theta'?" in mistakes_in({"rope_thetta": 1.0})["rope_thetta"]
    assert "neuron_config.on_cpuu" in mistakes_in({"neuron_config": {"on_cpuu": True}})


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["a: /models/a", "b : /models/b:1"], {"a": "/models/a", "b": "/models/b:1"}),
        ({"a": "/models/a"}, {"a": "/models/a"}),
        (None, {}),
    ],
)
def test_adapters_as_a_list(given: Any, read: dict[str, str]) -> None:
    lora_config = {"max_loras": 2, "lora_ckpt_paths": given, "dynamic_multi_lora": False}
    config: Any = resolve({"neuron_config": {"lora_config": lora_config}}, "trn2").config.neuron_config
    assert config.lora_config.lora_ckpt_paths == read


@pytest.mark.parametrize("given", [["a"], ["a:1", "a:2"], [3]])
def test_adapters_that_are_none(given: Any) -> None:
    document = {"neuron_config": {"lora_config": {"lora_ckpt_paths": given}}}
    assert mistakes_in(document).keys() == {"neuron_config.lora_config.lora_ckpt_paths"}


def test_flat_names_of_fused_token_generation() -> None:
    flat = {"moe_fused_nki_kernel_enabled": True, "router_topk_nki_kernel_enabled": None}
    document: dict[str, Any] = {"neuron_config": {**flat, "moe_fused_tkg_config": {"quantized": False}}}
    config: Any = resolve(document, "trn2").config.neuron_config
    assert config.moe_fused_tkg_config.moe_fused_kernel_enabled is True
    assert config.moe_fused_tkg_config.router_topk_kernel_enabled is None
    document["neuron_config"]["moe_fused_tkg_config"]["moe_fused_kernel_enabled"] = False
    accepted = mistakes_in(document)["neuron_config.moe_fused_nki_kernel_enabled"]
    assert accepted == "False, which moe_fused_tkg_config.moe_fused_kernel_enabled says"


def test_setting_by_an_alias_sets_the_original() -> None:
    document = {"attribute_map": {"n_embd": "hidden_size"}, "n_embd": 64}
    assert resolve(document).config.model_attributes == {"hidden_size": 64}
    assert resolve(document).config.attribute_map == {"n_embd": "hidden_size"}
    assert resolve(document | {"hidden_size": 64}).config.model_attributes == {"hidden_size": 64}


@pytest.mark.parametrize(
    ("document", "field", "accepted"),
    [
        ({"n_embd": 64, "hidden_size": 32}, "n_embd", "32, which hidden_size says: attribute_map makes them one"),
        ({"attribute_map": {"neuron_config": "hidden_size"}}, "attribute_map", "names of model attributes"),
        ({"attribute_map": {"x": "neuron_config"}}, "attribute_map", "names of model attributes"),
        ({"attribute_map": {"x": 3}}, "attribute_map", "an object whose values are text"),
        ({"attribute_map": {"x": [], "hidden_size": {}}}, "attribute_map", "an object whose values are text"),
        ({"attribute_map": "x"}, "attribute_map", "an object whose values are text"),
        ({"initializer_range": math.inf}, "initializer_range", "finite numbers"),
        ({"rope_scaling": {"short_factor": [1.0, math.inf]}}, "rope_scaling", "finite numbers"),
        (json.loads('{"id2label": ' + "[" * 900 + "]" * 900 + "}"), "id2label", "a JSON value"),
    ],
)
def test_a_mistake(document: dict[str, Any], field: str, accepted: str) -> None:
    mistakes = mistakes_in({"attribute_map": {"n_embd": "hidden_size"}} | document)
    assert accepted in mistakes[field]


def test_a_draft_model_is_read_likewise() -> None:
    document = read_saved(enable_fused_speculation=True, speculation_length=4, kv_cache_tiling=True)
    draft = read_saved(quantize_clamp_bound=math.inf) | {"attribute_map": {"n_embd": "hidden_size"}, "n_embd": 32}
    del draft["hidden_size"]
    cls = {"__module__": "models.llama", "__name__": "NeuronLlamaModel"}
    fused = {"worker_cls": cls, "draft_model_cls": cls, "draft_model_path": "draft", "draft_config": draft}
    read: Any = resolve(document | {"fused_spec_config": fused}, "trn2").config.fused_spec_config
    assert read.worker_cls == read.draft_model_cls == "models.llama.NeuronLlamaModel"
    assert read.draft_config.model_attributes["hidden_size"] == 32
    draft["hidden_sizes"] = draft["neuron_config"]["lora_config"] = {"lora_ckpt_paths": [3]}
    mistakes = mistakes_in(document | {"fused_spec_config": fused})
    assert mistakes.keys() == {"fused_spec_config.draft_config.neuron_config.lora_config.lora_ckpt_paths"}


def test_adapters_as_they_are_saved() -> None:
    lora = {
        "max_loras": 2,
        "max_lora_rank": 16,
        "max_cpu_loras": 100,
        "batch_size": 1,
        "target_modules": ["q_proj", "v_proj"],
        "lora_bias": "none",
        "lora_ckpt_paths": {"a": "/models/a"},
        "lora_ckpt_paths_cpu": {"a": "/models/a", "b": "/models/b"},
        "lora_ckpt_json": None,
        "lora_memory_transpose": True,
        "lora_shard_linear_layer": True,
        "is_context_encoding": False,
        "dynamic_multi_lora": True,
        "eviction_policy": "lru",
        "lfu_decay_period": 128,
        "base_model_quantized": False,
    }
    config: Any = resolve(read_saved(lora_config=lora), "trn1").config.neuron_config
    assert config.lora_config.enable_dynamic_multi_lora
    assert config.lora_config.target_modules == ("q_proj", "v_proj")
    assert config.lora_config.lora_ckpt_paths_cpu == {"a": "/models/a", "b": "/models/b"}
