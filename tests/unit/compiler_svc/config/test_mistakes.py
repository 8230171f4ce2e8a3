"""Mistakes: each named by field, value and what is accepted, and all of them at once."""

import math
from typing import Any

import pytest

from compiler_svc.errors import ConfigInvalid
from tests.unit.compiler_svc.config.resolving import mistakes_in, mistakes_in_document, nest, resolve


def test_ten_mistakes_are_one_error() -> None:
    found = mistakes_in_document(
        {
            "neuron_config": {
                "batch_size": "4",
                "seq_len": 64,
                "max_context_length": 65,
                "max_new_tokens": -896,
                "context_encoding_bucket": [64],
                "enable_bucketing": True,
                "token_generation_buckets": [64, 32],
                "on_device_sampling_config": {"top_p": 1.5, "top_k": 1000},
                "lora_config": {"max_loras": 0},
                "router_config": {"act_fn": "relu"},
                "quantized": True,
                "enable_fused_speculation": True,
            },
            "fused_spec_config": {"draft_config": {"neuron_config": {"tp_degre": 2}}},
        }
    )
    assert {
        "neuron_config.batch_size",
        "neuron_config.max_context_length",
        "neuron_config.max_new_tokens",
        "neuron_config.context_encoding_bucket",
        "neuron_config.token_generation_buckets",
        "neuron_config.on_device_sampling_config.top_p",
        "neuron_config.on_device_sampling_config.top_k",
        "neuron_config.lora_config.max_loras",
        "neuron_config.router_config.act_fn",
        "neuron_config.draft_model_modules_to_not_convert",
        "fused_spec_config.draft_config.neuron_config.tp_degre",
    } <= found.keys()
    assert found["neuron_config.max_new_tokens"].value == "-896"
    assert found["fused_spec_config.draft_config.neuron_config.tp_degre"].accepted == "did you mean 'tp_degree'?"


def test_what_is_not_served_is_listed_with_the_mistakes() -> None:
    found = mistakes_in(batch_size="4", flash_decoding_enabled=True)
    assert set(found) == {"batch_size", "flash_decoding_enabled"}
    assert found["batch_size"].value == "'4'"
    assert found["flash_decoding_enabled"].accepted == "False, all that this version serves"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seq_len", -1),
        ("seq_len", 2**31),
        ("seq_len", "128"),
        ("seq_len", True),
        ("seq_len", 128.0),
        ("seq_len", [128]),
        ("torch_dtype", "float64"),
        ("torch_dtype", 32),
        ("rpl_reduce_dtype", "int8"),
        ("cast_type", "declared"),
        ("async_mode", "yes"),
        ("logical_nc_config", 3),
        ("tp_degree", 0),
        ("tp_degree", 65),
        ("tp_degree", 2**31 - 1),
        ("on_device_sampling_config", True),
        ("context_encoding_buckets", 64),
        ("context_encoding_buckets", [64, 64]),
        ("token_generation_buckets", [0, 64]),
        ("token_generation_buckets", [64, "128"]),
        ("prefix_buckets", [512, 256]),
        ("cc_pipeline_tiling_factor", 0),
        ("weights_to_skip_layout_optimization", [""]),
        ("modules_to_not_convert", "lm_head"),
        ("quantization_dtype", "int3"),
        ("medusa_tree", [[0], [-1]]),
        ("medusa_tree", [[]]),
        ("medusa_tree", [0]),
        ("capacity_factor", 0),
        ("gate_clamp_upper_limit", "high"),
        ("gate_clamp_upper_limit", math.nan),
        ("hidden_act_bias", math.inf),
        ("glu_type", "geglu"),
        ("on_device_sampling_config.top_k", -2),
        ("on_device_sampling_config.top_k", 257),
        ("on_device_sampling_config.top_p", 1.5),
        ("on_device_sampling_config.top_p", "0.9"),
        ("on_device_sampling_config.temperature", -1),
        ("on_device_sampling_config.temperature", math.inf),
        ("on_device_sampling_config.temperature", 10**400),
        ("on_device_sampling_config.do_sample", 0),
        ("on_device_sampling_config.global_topk", -1),
        ("lora_config.lora_ckpt_paths", {"a": 1}),
        ("router_config.dtype", "float8"),
        ("routed_experts_mlp_ops_config.num_experts", 0),
        ("blockwise_matmul_config.block_sharding_strategy", "EVEN"),
        ("moe_fused_tkg_config.quantized", "yes"),
        ("hybrid_sharding_config.moe_cte_tp_degree", 0),
        ("hybrid_sharding_config", [1]),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "trn2"])
def test_each_names_field_value_and_what_is_accepted(path: str, value: Any, target: Any) -> None:
    found = mistakes_in(target, **nest(path, value))
    assert path in found
    assert set(found) <= {path, path.partition(".")[0]}, "a table may not be served at all"
    assert found[path].value == repr(value) or value == 10**400
    assert found[path].accepted


@pytest.mark.parametrize("name", ["worker_cls", "draft_model_cls"])
@pytest.mark.parametrize("value", [1, "", {"__name__": "X"}, {"module": "m", "name": "X"}])
def test_classes(name: str, value: Any) -> None:
    assert f"fused_spec_config.{name}" in mistakes_in_document({"fused_spec_config": {name: value}})


def test_a_rule_is_silent_where_an_attribute_that_it_reads_is_mistaken_already() -> None:
    assert set(mistakes_in(seq_len="64", max_context_length=65, max_length=32)) == {"seq_len"}


def test_a_mistake_of_an_option_of_transformers_neuronx_is_named_where_it_was_made() -> None:
    found = mistakes_in_document(
        {"transformers_neuronx": {"amp": "f64", "batch_size": 0}, "neuron_config": {"seq_len": 0}}
    )
    assert set(found) == {"transformers_neuronx.amp", "transformers_neuronx.batch_size", "neuron_config.seq_len"}


def test_an_option_may_not_be_given_under_both_names() -> None:
    found = mistakes_in_document({"transformers_neuronx": {"batch_size": 2}, "neuron_config": {"batch_size": 2}})
    assert set(found) == {"transformers_neuronx.batch_size"}
    assert found["transformers_neuronx.batch_size"].accepted == "unset, because neuron_config.batch_size is set"


@pytest.mark.parametrize("section", [[], "x", 3, True])
@pytest.mark.parametrize("name", ["neuron_config", "fused_spec_config", "transformers_neuronx", "attribute_map"])
def test_sections_are_objects(name: str, section: Any) -> None:
    assert set(mistakes_in_document({name: section})) == {name}


def test_the_status_stays_small() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        resolve(**{f"unknown_{number}" + "x" * 60: "y" * 1000 for number in range(200)})
    assert len(str(caught.value)) < 2000
    assert sum(len(str(violation)) for violation in caught.value.violations) < 6000
