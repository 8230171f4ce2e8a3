from typing import Any

import pytest

from compiler_svc.config import resolve_config

DYNAMIC_KERNEL = {"use_shard_on_block_dynamic_while": True, "num_static_blocks": 2}


def warnings_on(neuron_config: dict[str, Any]) -> list[str]:
    resolution = resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=None, target="trn2")
    return list(resolution.warnings)


@pytest.mark.parametrize(
    ("doubtful", "plain", "beginning"),
    [
        (
            {"enable_bucketing": True, "prefix_buckets": [64]},
            {"enable_bucketing": True},
            "neuron_config.prefix_buckets: they are ignored because is_prefix_caching is false",
        ),
        (
            {"prefix_buckets": [64]},
            {},
            "neuron_config: bucket lists are ignored because enable_bucketing is false",
        ),
        (
            {"enable_bucketing": True, "context_encoding_buckets": [64]},
            {"enable_bucketing": True, "context_encoding_buckets": [64, 128]},
            "neuron_config.context_encoding_buckets: prompts longer than the last bucket are refused",
        ),
        (
            {"pa_num_blocks": 64},
            {"pa_num_blocks": 64, "is_block_kv_layout": True},
            "neuron_config: pa_num_blocks and pa_block_size are ignored",
        ),
        (
            {"quantized_checkpoints_path": "quantized"},
            {"quantized_checkpoints_path": "quantized", "quantized": True},
            "neuron_config.quantized_checkpoints_path: it is ignored because quantized is false",
        ),
        (
            {"modules_to_not_convert": ["lm_head"]},
            {"modules_to_not_convert": ["lm_head"], "quantized": True, "quantized_checkpoints_path": "quantized"},
            "neuron_config.modules_to_not_convert: it is ignored because quantized is false",
        ),
        (
            {"draft_model_modules_to_not_convert": ["lm_head"]},
            {},
            "neuron_config.draft_model_modules_to_not_convert: it is ignored",
        ),
        (
            {"enable_eagle_draft_input_norm": True},
            {"enable_eagle_draft_input_norm": True, "enable_eagle_speculation": True, "is_eagle_draft": True},
            "neuron_config.enable_eagle_draft_input_norm: it is ignored",
        ),
        (
            {"num_medusa_heads": 2},
            {"is_medusa": True, "num_medusa_heads": 2, "medusa_speculation_length": 2, "medusa_tree": [[0]]},
            "neuron_config: Medusa's heads, tree and length are ignored",
        ),
        (
            {"lora_config": {"base_model_quantized": True}},
            {"lora_config": {}},
            "neuron_config.lora_config.base_model_quantized: it is True, but quantized, which counts, is False",
        ),
        (
            {"lora_config": {"lora_ckpt_paths_cpu": {"one": "one"}}},
            {"lora_config": {"lora_ckpt_paths_cpu": {"one": "one"}, "enable_dynamic_multi_lora": True}},
            "neuron_config.lora_config.lora_ckpt_paths_cpu: adapters in host memory are never loaded",
        ),
        (
            {
                "moe_ep_degree": 4,
                "tp_degree": 4,
                "hybrid_sharding_config": {"moe_cte_tp_degree": 4, "moe_tkg_tp_degree": 4},
            },
            {"tp_degree": 4, "hybrid_sharding_config": {"moe_cte_tp_degree": 4, "moe_tkg_tp_degree": 4}},
            "neuron_config: moe_tp_degree and moe_ep_degree are ignored",
        ),
        (
            {"blockwise_matmul_config": {"num_static_blocks": 2}},
            {"blockwise_matmul_config": DYNAMIC_KERNEL},
            "neuron_config.blockwise_matmul_config.num_static_blocks: it is ignored",
        ),
    ],
)
def test_what_does_not_count_is_said(doubtful: dict[str, Any], plain: dict[str, Any], beginning: str) -> None:
    assert [warning for warning in warnings_on(doubtful) if warning.startswith(beginning)]
    assert not [warning for warning in warnings_on(plain) if warning.startswith(beginning)]


def test_a_draft_model_is_named() -> None:
    target = {"speculation_length": 5, "enable_fused_speculation": True, "on_device_sampling_config": {}}
    draft = {"num_medusa_heads": 2, "on_device_sampling_config": {"top_k": 5}}
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    document = {"neuron_config": target, "fused_spec_config": fused_spec_config}
    warnings = resolve_config(document, checkpoint_dtype=None, target="trn2").warnings
    place = "fused_spec_config.draft_config.neuron_config"
    assert any(warning.startswith(f"{place}: Medusa's heads") for warning in warnings)
    assert any(warning.startswith(f"{place}.on_device_sampling_config: top_k") for warning in warnings)
