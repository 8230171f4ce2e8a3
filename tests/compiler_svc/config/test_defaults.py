"""Defaults, derived values and normalized spellings."""

from typing import Any

import pytest

from compiler_svc.config import MoENeuronConfig, TargetKind, resolve_config
from compiler_svc.errors import FeatureNotServed
from tests.compiler_svc.config.resolving import mistakes_in, resolve


def test_every_default() -> None:
    resolution = resolve_config({}, checkpoint_dtype=None)
    assert (resolution.warnings, resolution.hints) == ((), ())
    assert resolution.config.to_json() == {
        "neuron_config": {
            "batch_size": 1,
            "padding_side": "right",
            "seq_len": 128,
            "max_context_length": 128,
            "max_new_tokens": None,
            "max_length": 128,
            "n_active_tokens": 128,
            "n_positions": 128,
            "torch_dtype": "bfloat16",
            "rpl_reduce_dtype": None,
            "cast_type": "config",
            "async_mode": False,
            "save_sharded_checkpoint": True,
            "skip_sharding": False,
            "logical_nc_config": 1,
            "skip_warmup": False,
            "weights_to_skip_layout_optimization": [],
            "scratchpad_page_size": None,
            "allow_input_truncation": False,
            "tp_degree": 1,
            "cc_pipeline_tiling_factor": 2,
            "output_logits": False,
            "enable_bucketing": False,
            "context_encoding_buckets": [128],
            "token_generation_buckets": [128],
            "prefix_buckets": [],
            "token_generation_batches": [],
            "is_continuous_batching": False,
            "max_batch_size": 1,
            "ctx_batch_size": 1,
            "tkg_batch_size": 1,
            "fused_qkv": False,
            "flash_decoding_enabled": False,
            "sequence_parallel_enabled": False,
            "qk_layernorm": False,
            "attention_dtype": None,
            "kv_cache_quant": False,
            "is_block_kv_layout": False,
            "pa_num_blocks": 1,
            "pa_block_size": 128,
            "is_prefix_caching": False,
            "attn_kernel_enabled": None,
            "qkv_kernel_enabled": False,
            "mlp_kernel_enabled": False,
            "quantized_mlp_kernel_enabled": False,
            "rmsnorm_quantize_kernel_enabled": False,
            "on_device_sampling_config": None,
            "quantized": False,
            "quantized_checkpoints_path": None,
            "quantization_dtype": "int8",
            "quantization_type": "per_tensor_symmetric",
            "modules_to_not_convert": [],
            "draft_model_modules_to_not_convert": [],
            "speculation_length": 0,
            "spec_batch_size": 1,
            "enable_eagle_speculation": False,
            "enable_eagle_draft_input_norm": False,
            "is_eagle_draft": False,
            "enable_fused_speculation": False,
            "is_medusa": False,
            "medusa_speculation_length": 0,
            "num_medusa_heads": 0,
            "medusa_tree": [],
            "lora_config": None,
        }
    }


def test_sampling_defaults() -> None:
    sampling = resolve(on_device_sampling_config={}).config.neuron_config.on_device_sampling_config
    assert sampling is not None
    assert (sampling.do_sample, sampling.top_k, sampling.top_p, sampling.temperature) == (False, 1, 1.0, 1.0)
    assert (sampling.dynamic, sampling.deterministic, sampling.global_topk) == (False, False, 256)
    assert sampling.is_greedy


def test_expert_defaults() -> None:
    config = resolve(target="trn2", glu_mlp=True, routed_experts_mlp_ops_config={}).config.neuron_config
    assert isinstance(config, MoENeuronConfig)
    assert (config.moe_tp_degree, config.moe_ep_degree, config.capacity_factor) == (1, 1, None)
    assert (config.glu_type, config.hidden_act_scaling_factor, config.hidden_act_bias) == ("glu", 1.0, 0.0)
    assert config.normalize_top_k_affinities
    assert (config.router_config.act_fn, config.router_config.dtype) == ("softmax", "float32")
    assert (config.blockwise_matmul_config.block_size, config.blockwise_matmul_config.logical_nc_config) == (512, 2)
    assert config.moe_fused_tkg_config.moe_fused_kernel_enabled is None
    assert config.hybrid_sharding_config is None
    routed = config.routed_experts_mlp_ops_config
    assert routed is not None
    assert (routed.glu_mlp, routed.normalize_top_k_affinities, routed.num_experts) == (True, False, None)


def test_adapter_defaults() -> None:
    adapters = resolve(target="trn2", lora_config={}).config.neuron_config.lora_config
    assert adapters is not None
    assert (adapters.max_loras, adapters.max_lora_rank, adapters.max_cpu_loras) == (1, 16, 100)
    assert (adapters.lora_memory_transpose, adapters.lora_shard_linear_layer) == (True, True)
    assert (adapters.lora_ckpt_paths, adapters.target_modules, adapters.lora_ckpt_json) == ({}, (), None)


@pytest.mark.parametrize(("target", "cores"), [("cpu", 1), ("inf2", 1), ("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_logical_cores_are_the_targets(target: TargetKind, cores: int) -> None:
    config = resolve(target=target).config.neuron_config
    assert config.logical_nc_config == config.logical_neuron_cores == cores


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"seq_len": 256}, {"max_context_length": 256, "max_length": 256, "n_positions": 256, "max_new_tokens": None}),
        ({"seq_len": 256, "max_context_length": 192}, {"max_new_tokens": 64, "context_encoding_buckets": (192,)}),
        ({"seq_len": 64, "max_length": 96}, {"token_generation_buckets": (96,), "longest_sequence": 64}),
        ({"batch_size": 4}, {"max_batch_size": 4, "ctx_batch_size": 4, "tkg_batch_size": 4, "pa_num_blocks": 4}),
        ({"batch_size": 4, "ctx_batch_size": 1}, {"max_batch_size": 4, "ctx_batch_size": 1, "tkg_batch_size": 4}),
        ({"max_batch_size": 4, "tkg_batch_size": 4}, {"batch_size": 1, "ctx_batch_size": 1, "max_batch_size": 4}),
        (
            {"seq_len": 1000, "enable_bucketing": True, "max_context_length": 181},
            {"context_encoding_buckets": (181,), "token_generation_buckets": (128, 256, 512, 1000)},
        ),
        (
            {"seq_len": 256, "enable_bucketing": True, "context_encoding_buckets": [16, 64]},
            {"context_encoding_buckets": (16, 64), "longest_prompt": 64, "token_generation_buckets": (128, 256)},
        ),
        ({"torch_dtype": "torch.float32"}, {"torch_dtype": "float32"}),
    ],
)
def test_derived_values(given_values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = resolve(**given_values).config.neuron_config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given_values", "fused", "trace"),
    [
        ({}, False, True),
        ({"speculation_length": 4}, False, False),
        ({"is_eagle_draft": True, "enable_eagle_speculation": True, "speculation_length": 4}, False, False),
    ],
)
def test_speculation_decides_about_fusing_and_the_token_generation_model(
    given_values: dict[str, Any], fused: bool, trace: bool
) -> None:
    config = resolve(target="trn2", **given_values).config.neuron_config
    assert (config.enable_fused_speculation, config.trace_tokengen_model) == (fused, trace)


def test_unset_and_null_take_the_default_and_zero_does_not() -> None:
    assert resolve(max_new_tokens=None, seq_len=None).config == resolve().config
    assert mistakes_in(max_new_tokens=0)["max_new_tokens"].value == "0"
    assert mistakes_in(batch_size=0)["batch_size"].accepted == (
        "an integer from 1 to 2147483647 (NxD Inference API guide, General configuration)"
    )


def test_minus_one_is_no_top_k_limit() -> None:
    sampling = resolve(on_device_sampling_config={"top_k": -1}).config.neuron_config.on_device_sampling_config
    assert sampling is not None
    assert sampling.top_k == 0


@pytest.mark.parametrize("limit", [float("inf"), float("-inf"), "Infinity", "-Infinity"])
def test_an_infinite_limit_is_none(limit: object) -> None:
    config = resolve(gate_clamp_upper_limit=limit, quantize_clamp_bound=limit).config.neuron_config
    assert isinstance(config, MoENeuronConfig)
    assert config.gate_clamp_upper_limit is None


class TestDtype:
    def test_the_checkpoint_decides_where_the_configuration_does_not(self) -> None:
        assert resolve("float32").config.neuron_config.torch_dtype == "float32"
        assert resolve("float32", torch_dtype="bfloat16").config.neuron_config.torch_dtype == "bfloat16"
        assert resolve(None).config.neuron_config.torch_dtype == "bfloat16"

    @pytest.mark.parametrize("target", ["cpu", "trn2"])
    def test_a_checkpoint_in_a_dtype_that_is_none_needs_an_explicit_one(self, target: TargetKind) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve("float64", target)
        (violation,) = caught.value.violations
        assert violation.field == "neuron_config.torch_dtype"
        assert violation.value == "'float64' from the checkpoint"
        assert resolve("float64", target, torch_dtype="float32").config.neuron_config.torch_dtype == "float32"
