"""Document → configuration → NxD Inference's file → configuration, for every attribute."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from compiler_svc.config import InferenceConfig, parse_document, resolve_config
from compiler_svc.config.attribute import ConfigTable
from compiler_svc.config.findings import Findings
from compiler_svc.config.interchange import adapt_document, to_neuron_config_json
from compiler_svc.config.resolve import assemble_inference_config
from compiler_svc.config.tables import INFERENCE_CONFIG, NEURON_CONFIG, TABLES
from compiler_svc.config.validator import Validator
from tests.unit.compiler_svc.config.interchange.documents import draw_document


def read(document: dict[str, Any]) -> InferenceConfig:
    """Reads a document even if it breaks rules between attributes. Its names and values must be valid."""
    findings = Findings()
    validator = Validator("trn2", {"target": "trn2", "checkpoint_dtype": None}, findings)
    return assemble_inference_config(
        validator.validate("", adapt_document(document, findings), INFERENCE_CONFIG, outer={}).values
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw_document())
def test_any_document(document: dict[str, Any]) -> None:
    config = read(document)
    text = to_neuron_config_json(config, {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0})
    again = read(parse_document(text))
    model_config = {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0}
    assert again.model_attributes == model_config | config.model_attributes
    assert again.neuron_config == config.neuron_config
    assert again.fused_spec_config == config.fused_spec_config
    assert to_neuron_config_json(again, {}) == text


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.class_name)
def test_every_attribute_is_written(table: ConfigTable) -> None:
    every = {row.name for row in table.attributes if not row.deprecated}
    renamed = {"enable_dynamic_multi_lora": "dynamic_multi_lora"}
    expected = {renamed.get(name, name) for name in every}
    neuron_config = {
        "glu_mlp": True,
        "activation_quantization_type": "none",
        "logit_processors": True,
        "output_prompt_logprobs": True,
        "output_embeddings": True,
        "on_device_sampling_config": {},
        "kv_quant_config": {},
        "lora_config": {},
        "hybrid_sharding_config": {},
        "routed_experts_mlp_ops_config": {},
    }
    fused = {"draft_model_path": "draft", "draft_config": {"attribute_map": {"n_embd": "hidden_size"}}}
    document = {"neuron_config": neuron_config, "fused_spec_config": fused, "attribute_map": {"n_embd": "hidden_size"}}
    written = json.loads(to_neuron_config_json(read(document), {}))
    assert expected <= _find(written, table).keys()


def _find(written: dict[str, Any], table: ConfigTable) -> dict[str, Any]:
    if table is INFERENCE_CONFIG:
        return written
    inside: dict[str, Any] = written if table.class_name == "FusedSpecNeuronConfig" else written["neuron_config"]
    if table is NEURON_CONFIG:
        return inside
    owner = INFERENCE_CONFIG if table.class_name == "FusedSpecNeuronConfig" else NEURON_CONFIG
    name = next(row.name for row in owner.attributes if row.domain.table == table.class_name)
    found: dict[str, Any] = inside[name]
    return found


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"neuron_config": {"seq_len": 1024, "enable_bucketing": True, "torch_dtype": "torch.float32"}},
        {"neuron_config": {"context_encoding_buckets": [64], "token_generation_buckets": [64, 128]}},
        {"neuron_config": {"enable_bucketing": True, "is_block_kv_layout": True, "is_prefix_caching": True}},
        {"neuron_config": {"normalize_top_k_affinities": False, "gate_clamp_upper_limit": float("inf")}},
        {"transformers_neuronx": {"n_positions": 1500, "amp": "bf16", "on_device_generation": {"do_sample": True}}},
        {"neuron_config": {"on_device_sampling_config": {"dynamic": True}, "output_logits": True}, "rope_theta": 1e6},
    ],
    ids=str,
)
def test_a_configuration_in_order_stays_in_order(document: dict[str, Any]) -> None:
    resolution = resolve_config(document, checkpoint_dtype=None, target="trn2")
    text = to_neuron_config_json(resolution.config, {})
    again = resolve_config(parse_document(text), checkpoint_dtype="float32", target="trn2")
    assert again.config == resolution.config
    (note,) = again.warnings[-1:]
    assert note.startswith("neuron_config: no document names world_size, local_ranks_size, start_rank_id")


@pytest.mark.parametrize("normalizes", [True, False])
def test_normalized_affinities_survive_upstream_too(normalizes: bool) -> None:
    config = read({"neuron_config": {"normalize_top_k_affinities": normalizes}})
    written = json.loads(to_neuron_config_json(config, {}))["neuron_config"]
    assert written["normalize_top_k_affinities"] is normalizes
    # This is the one that NxD Inference reads.
    assert written["disable_normalize_top_k_affinities"] is not normalizes
    assert read({"neuron_config": written}).neuron_config == config.neuron_config
    # NxD Inference's own files have only this.
    del written["disable_normalize_top_k_affinities"]
    assert read({"neuron_config": written}).neuron_config == config.neuron_config


def test_the_form_is_that_of_nxd_inference() -> None:
    fused = {"worker_cls": "models.llama.NeuronLlamaModel", "draft_config": {"neuron_config": {"seq_len": 64}}}
    lora = {"enable_dynamic_multi_lora": True, "lora_ckpt_paths": {"a": "/a"}}
    document = {"neuron_config": {"tp_degree": 2, "lora_config": lora}, "fused_spec_config": fused}
    text = to_neuron_config_json(read(document), {"hidden_size": 64, "torch_dtype": "float32", "dtype": "float32"})
    written = json.loads(text)
    assert text == json.dumps(written, indent=2, sort_keys=True) + "\n"
    assert written.keys() == {"hidden_size", "pad_token_id", "neuron_config", "fused_spec_config", "metadata"}
    assert written["fused_spec_config"]["worker_cls"] == {"__module__": "models.llama", "__name__": "NeuronLlamaModel"}
    assert written["fused_spec_config"]["draft_config"]["neuron_config"]["seq_len"] == 64
    neuron_config = written["neuron_config"]
    assert neuron_config["torch_dtype"] == "bfloat16"
    assert neuron_config["overrides_torch_dtype"] is True
    assert neuron_config["world_size"] == neuron_config["local_ranks_size"] == 2
    assert neuron_config["context_encoding_buckets"] is None
    assert neuron_config["lora_config"]["dynamic_multi_lora"] is True
    assert neuron_config["lora_config"]["lora_ckpt_paths"] == {"a": "/a"}
    assert "enable_dynamic_multi_lora" not in neuron_config["lora_config"]


@pytest.mark.parametrize(
    ("rope", "written"),
    [
        ({"rope_type": "default", "rope_theta": 5.0}, {"rope_theta": 5.0, "rope_scaling": None}),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_attributes_that_nxd_inference_requires(rope: dict[str, Any], written: dict[str, Any]) -> None:
    document = json.loads(to_neuron_config_json(read({}), {"hidden_size": 64, "rope_parameters": rope}))
    assert {name: document[name] for name in written} == written
    assert document["rope_parameters"] == rope
    assert document["pad_token_id"] is None
