"""Attributes that the cpu target honours, each with another value of it and what that changes.

No torch here: `tests/unit/compiler_svc/config/test_honoured.py` reads which attributes there are.
"""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class GraphCase:
    """Attributes of NeuronConfig whose values change the graph of token generation.

    Attributes:
        common: What is set before and after.
        values: What is set after.
    """

    common: dict[str, Any]
    values: dict[str, Any]

    def __str__(self) -> str:
        return "-".join(self.values)


@dataclass(frozen=True)
class PlanCase(GraphCase):
    """Attributes of NeuronConfig whose values change the plan of a build.

    Attributes:
        changed: All that the plan says differently, before and after.
    """

    changed: dict[str, tuple[Any, Any]]


_BLOCKS: Final = {"is_block_kv_layout": True, "pa_num_blocks": 6, "pa_block_size": 8}
_PREFIXES: Final = {"is_prefix_caching": True, "prefix_buckets": [16, 32]}
_BATCHES: Final = {"batch_size": 4, "enable_bucketing": True, "token_generation_buckets": [32]}
_LISTS: Final = {"context_encoding_buckets": [8, 32], "token_generation_buckets": [16, 32]}
_PROMPT_LOGPROBS: Final = "prompt_logprobs prompt_top_ids prompt_top_logprobs"
_GREEDY: Final = {"on_device_sampling_config": {}}
_QUANTIZED: Final = {"quantized": True}

PLAN_CASES: Final = (
    PlanCase({}, {"batch_size": 3}, {"slots": (1, 3), "prefill rows": (1, 3), "decode rows": (1, 3)}),
    PlanCase({"batch_size": 3}, {"ctx_batch_size": 1}, {"prefill rows": (3, 1)}),
    PlanCase({}, {"max_batch_size": 2}, {"slots": (1, 2)}),
    PlanCase({"max_batch_size": 4}, {"tkg_batch_size": 2}, {"decode rows": (1, 2)}),
    PlanCase(
        {"pa_num_blocks": 6, "pa_block_size": 8},
        {"is_block_kv_layout": True},
        {"blocks": ((0, 0), (6, 8)), "cache inputs": ("seq_ids", "slot_mapping active_block_table")},
    ),
    PlanCase(_BLOCKS, {"pa_num_blocks": 7}, {"blocks": ((6, 8), (7, 8))}),
    PlanCase(_BLOCKS, {"pa_block_size": 16}, {"blocks": ((6, 8), (6, 16))}),
    PlanCase(
        _BLOCKS | {"enable_bucketing": True},
        _PREFIXES,
        {"prompts": ("32", "32x0 32x16 32x32"), "prefix caching": (False, True)},
    ),
    PlanCase(_BATCHES, {"token_generation_batches": [2]}, {"decodes": ("32", "4x32 2x32"), "decode rows": (4, 2)}),
    PlanCase(
        {},
        {"seq_len": 64},
        {
            "prompts": ("32", "64"),
            "decodes": ("32", "64"),
            "KV positions": (32, 64),
            "prompt": (32, 64),
            "sequence": (32, 64),
        },
    ),
    PlanCase({"max_new_tokens": 8}, {"max_context_length": 24}, {"prompts": ("32", "24"), "prompt": (32, 24)}),
    PlanCase({"seq_len": 64}, {"n_active_tokens": 16}, {"prompts": ("64", "16"), "prompt": (64, 16)}),
    PlanCase(
        {"seq_len": 64},
        {"n_positions": 32},
        {"prompts": ("64", "32"), "decodes": ("64", "32"), "prompt": (64, 32), "sequence": (64, 32)},
    ),
    PlanCase({}, {"max_new_tokens": 7}, {"new tokens": (None, 7)}),
    PlanCase({}, {"max_length": 96}, {"decodes": ("32", "96"), "KV positions": (32, 96)}),
    PlanCase(
        {"seq_len": 256}, {"enable_bucketing": True}, {"prompts": ("256", "128 256"), "decodes": ("256", "128 256")}
    ),
    PlanCase({"enable_bucketing": True}, _LISTS, {"prompts": ("32", "8 32"), "decodes": ("32", "16 32")}),
    PlanCase({}, {"torch_dtype": "bfloat16"}, {"weights": ("float32", "bfloat16")}),
    PlanCase({}, {"tp_degree": 2}, {"queries": (32, 16)}),
    PlanCase({}, {"padding_side": "left"}, {"left padded": ("", "context_encoding")}),
    PlanCase({}, {"allow_input_truncation": True}, {"truncates prompts": (False, True)}),
    PlanCase({}, {"skip_warmup": True}, {"skips warm-up": (False, True)}),
    # The graph of one rank may be the same: it returns its logits anyway, for the golden check.
    PlanCase(_GREEDY, {"output_logits": True}, {"outputs": ("tokens rank_logits", "tokens logits")}),
    PlanCase(
        _GREEDY,
        {"logit_processors": True},
        {"prompts": ("32", "32 32_processors"), "decodes": ("32", "32 32_processors")},
    ),
    PlanCase({}, {"output_prompt_logprobs": True}, {"prompt outputs": ("", _PROMPT_LOGPROBS)}),
    PlanCase({}, {"output_embeddings": True}, {"prompt outputs": ("", "last_hidden hidden_sum")}),
)

GRAPH_CASES: Final = (
    GraphCase({}, _GREEDY),
    GraphCase({}, {"fused_qkv": True}),
    GraphCase({"tp_degree": 2}, {"rpl_reduce_dtype": "bfloat16"}),
    GraphCase({"cast_type": "as-declared"}, {"attention_dtype": "bfloat16"}),
    GraphCase({}, {"kv_cache_quant": True}),
    GraphCase({}, {"kv_quant_config": {}}),
    GraphCase({"tp_degree": 2}, {"vocab_parallel": True}),
    GraphCase({}, _QUANTIZED),
    GraphCase(_QUANTIZED, {"quantization_dtype": "f8e4m3"}),
    GraphCase(_QUANTIZED, {"quantization_type": "per_channel_symmetric"}),
    GraphCase(_QUANTIZED, {"modules_to_not_convert": ["lm_head"]}),
    GraphCase(_QUANTIZED, {"activation_quantization_type": "dynamic"}),
)

#: Attributes of OnDeviceSamplingConfig, and a value that changes the graph.
SAMPLING_VALUES: Final = {
    "do_sample": False,
    "top_k": 6,
    "top_p": 0.8,
    "temperature": 0.6,
    "dynamic": True,
    "deterministic": True,
    "global_topk": 32,
}
