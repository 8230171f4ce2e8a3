"""Cases of the rules on quantization, kernels, sampling, adapters and experts."""

from tests.unit.compiler_svc.config.rules.rule_case import RuleCase

QUANTIZED = {"quantized": True, "quantized_checkpoints_path": "quantized"}

QUANTIZED_MLP = {
    "mlp_kernel_enabled": True,
    "quantized_mlp_kernel_enabled": True,
    "quantization_type": "per_channel_symmetric",
    "quantization_dtype": "f8e4m3",
}

QUANTIZATION_CASES = (
    RuleCase(
        "quantized_checkpoints_path",
        "the path of the quantized checkpoint",
        fails={"quantized": True},
        passes=QUANTIZED,
    ),
)

KERNEL_CASES = (
    RuleCase(
        "qkv_kernel_enabled",
        "false, unless fused_qkv is true",
        fails={"qkv_kernel_enabled": True},
        passes={"qkv_kernel_enabled": True, "fused_qkv": True},
    ),
    RuleCase(
        "qkv_kernel_enabled",
        "false, unless torch_dtype is 'bfloat16'",
        fails={"qkv_kernel_enabled": True, "fused_qkv": True, "torch_dtype": "float16"},
        passes={"qkv_kernel_enabled": True, "fused_qkv": True, "torch_dtype": "bfloat16"},
    ),
    RuleCase(
        "mlp_kernel_enabled",
        "false, unless torch_dtype is 'bfloat16'",
        fails={"mlp_kernel_enabled": True, "torch_dtype": "float32"},
        passes={"mlp_kernel_enabled": True, "torch_dtype": "torch.bfloat16"},
    ),
    RuleCase(
        "quantized_mlp_kernel_enabled",
        "false, unless mlp_kernel_enabled is true",
        fails=QUANTIZED_MLP | {"mlp_kernel_enabled": False},
        passes=QUANTIZED_MLP,
    ),
    RuleCase(
        "rmsnorm_quantize_kernel_enabled",
        "false, unless quantized_mlp_kernel_enabled is true",
        fails={"mlp_kernel_enabled": True, "rmsnorm_quantize_kernel_enabled": True},
        passes=QUANTIZED_MLP | {"rmsnorm_quantize_kernel_enabled": True},
    ),
    RuleCase(
        "quantization_type",
        "'per_channel_symmetric'",
        fails=QUANTIZED_MLP | {"quantization_type": "per_tensor_symmetric"},
        passes=QUANTIZED_MLP,
    ),
    RuleCase(
        "quantization_dtype",
        "'f8e4m3'",
        fails=QUANTIZED_MLP | {"quantization_dtype": "f8e5m2"},
        passes=QUANTIZED_MLP,
    ),
    RuleCase(
        "modules_to_not_convert",
        "a list of the modules that are left in full precision",
        fails=QUANTIZED | {"mlp_kernel_enabled": True},
        passes=QUANTIZED | {"mlp_kernel_enabled": True, "modules_to_not_convert": ["mlp"]},
    ),
)

SAMPLING_CASES = (
    RuleCase(
        "top_k",
        "at most global_topk",
        fails={"top_k": 65, "global_topk": 64},
        passes={"top_k": 64, "global_topk": 64},
        table="OnDeviceSamplingConfig",
    ),
)

LORA_CASES = (
    RuleCase(
        "lora_ckpt_json",
        "nothing, because adapters are listed in lora_ckpt_paths or lora_ckpt_paths_cpu",
        fails={"lora_ckpt_json": "adapters.json", "lora_ckpt_paths": {"one": "one"}},
        passes={"lora_ckpt_json": "adapters.json"},
        table="LoraServingConfig",
    ),
    RuleCase(
        "lora_ckpt_paths",
        "at most max_loras adapters",
        fails={"max_loras": 1, "lora_ckpt_paths": {"one": "one", "two": "two"}},
        passes={"max_loras": 2, "lora_ckpt_paths": {"one": "one", "two": "two"}},
        table="LoraServingConfig",
    ),
    RuleCase(
        "lora_ckpt_paths_cpu",
        "at most max_cpu_loras adapters",
        fails={
            "enable_dynamic_multi_lora": True,
            "max_cpu_loras": 1,
            "lora_ckpt_paths_cpu": {"one": "one", "two": "two"},
        },
        passes={
            "enable_dynamic_multi_lora": True,
            "max_cpu_loras": 2,
            "lora_ckpt_paths_cpu": {"one": "one", "two": "two"},
        },
        table="LoraServingConfig",
    ),
    RuleCase(
        "enable_dynamic_multi_lora",
        "false, unless lora_ckpt_paths_cpu or lora_ckpt_json",
        fails={"enable_dynamic_multi_lora": True, "lora_ckpt_paths": {"one": "one"}},
        passes={"enable_dynamic_multi_lora": True, "lora_ckpt_json": "adapters.json"},
        table="LoraServingConfig",
    ),
)

EXPERT_CASES = (
    RuleCase(
        "moe_tp_degree",
        "tp_degree / moe_ep_degree",
        fails={"tp_degree": 8, "moe_tp_degree": 2, "moe_ep_degree": 2},
        passes={"tp_degree": 8, "moe_tp_degree": 2, "moe_ep_degree": 4},
    ),
    RuleCase(
        "glu_type",
        "'glu', the default, because glu_mlp is false",
        fails={"glu_mlp": False, "glu_type": "swiglu"},
        passes={"glu_mlp": True, "glu_type": "swiglu"},
    ),
    RuleCase(
        "gate_clamp_lower_limit",
        "at most gate_clamp_upper_limit",
        fails={"gate_clamp_lower_limit": 7.0, "gate_clamp_upper_limit": -7.0},
        passes={"gate_clamp_lower_limit": -7.0, "gate_clamp_upper_limit": 7.0},
    ),
    RuleCase(
        "up_clamp_lower_limit",
        "at most up_clamp_upper_limit",
        fails={"up_clamp_lower_limit": 1.0, "up_clamp_upper_limit": 0.5},
        passes={"up_clamp_lower_limit": 1.0},
    ),
    RuleCase(
        "shared_experts_sequence_parallel_enabled",
        "false, unless sequence_parallel_enabled is true",
        fails={"shared_experts_sequence_parallel_enabled": True},
        passes={"shared_experts_sequence_parallel_enabled": True, "sequence_parallel_enabled": True},
    ),
    RuleCase(
        "hybrid_sharding_config.moe_cte_tp_degree",
        "tp_degree / moe_cte_ep_degree",
        fails={"tp_degree": 4, "hybrid_sharding_config": {"moe_cte_tp_degree": 2, "moe_tkg_tp_degree": 4}},
        passes={
            "tp_degree": 4,
            "hybrid_sharding_config": {"moe_cte_tp_degree": 2, "moe_cte_ep_degree": 2, "moe_tkg_tp_degree": 4},
        },
    ),
    RuleCase(
        "hybrid_sharding_config.moe_tkg_tp_degree",
        "tp_degree / moe_tkg_ep_degree",
        fails={"tp_degree": 4, "hybrid_sharding_config": {"moe_cte_tp_degree": 4, "moe_tkg_ep_degree": 2}},
        passes={"tp_degree": 4, "hybrid_sharding_config": {"moe_cte_tp_degree": 4, "moe_tkg_ep_degree": 4}},
    ),
    RuleCase(
        "moe_fused_tkg_config.quantized",
        "false, unless quantized of NeuronConfig is true",
        fails={"moe_fused_tkg_config": {"quantized": True}},
        passes=QUANTIZED | {"moe_fused_tkg_config": {"quantized": True}},
    ),
    RuleCase(
        "top_k",
        "at most num_experts",
        fails={"num_experts": 8, "top_k": 9},
        passes={"num_experts": 8, "top_k": 8},
        table="RoutedExpertsMLPOpsConfig",
    ),
    RuleCase(
        "early_expert_affinity_modulation",
        "false, because top_k is",
        fails={"num_experts": 8, "top_k": 2, "early_expert_affinity_modulation": True},
        passes={"num_experts": 8, "top_k": 1, "early_expert_affinity_modulation": True},
        table="RoutedExpertsMLPOpsConfig",
    ),
    RuleCase(
        "glu_type",
        "'glu', the default, because glu_mlp is false",
        fails={"glu_mlp": False, "glu_type": "swiglu"},
        passes={"glu_mlp": False, "glu_type": "glu"},
        table="RoutedExpertsMLPOpsConfig",
    ),
    RuleCase(
        "gate_clamp_lower_limit",
        "at most gate_clamp_upper_limit",
        fails={"gate_clamp_lower_limit": 2, "gate_clamp_upper_limit": 1},
        passes={"gate_clamp_lower_limit": 1, "gate_clamp_upper_limit": 1},
        table="RoutedExpertsMLPOpsConfig",
    ),
    RuleCase(
        "up_clamp_lower_limit",
        "at most up_clamp_upper_limit",
        fails={"up_clamp_lower_limit": 2, "up_clamp_upper_limit": 1},
        passes={"up_clamp_lower_limit": 0, "up_clamp_upper_limit": 1},
        table="RoutedExpertsMLPOpsConfig",
    ),
    RuleCase(
        "use_block_parallel",
        "false, unless logical_nc_config is 2",
        fails={"use_block_parallel": True, "logical_nc_config": 1},
        passes={"use_block_parallel": True},
        table="BlockwiseMatmulConfig",
    ),
    RuleCase(
        "use_shard_on_block_dynamic_while",
        "false, because use_shard_on_intermediate_dynamic_while is true",
        fails={"use_shard_on_block_dynamic_while": True, "use_shard_on_intermediate_dynamic_while": True},
        passes={"use_shard_on_block_dynamic_while": True},
        table="BlockwiseMatmulConfig",
    ),
)

CASES = (*QUANTIZATION_CASES, *KERNEL_CASES, *SAMPLING_CASES, *LORA_CASES, *EXPERT_CASES)
