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

PLAN_CASES: Final = (
    PlanCase(
        {},
        {"batch_size": 3},
        {"slots": (1, 3), "prefill rows": (1, 3), "decode rows": (1, 3)},
    ),
    PlanCase({"batch_size": 3}, {"ctx_batch_size": 1}, {"prefill rows": (3, 1)}),
    PlanCase({}, {"max_batch_size": 2}, {"slots": (1, 2)}),
    PlanCase({"max_batch_size": 4}, {"tkg_batch_size": 2}, {"decode rows": (1, 2)}),
    PlanCase(
        {"pa_num_blocks": 6, "pa_block_size": 8},
        {"is_block_kv_layout": True},
        {"blocks": ((0, 0), (6, 8)), "cache inputs": (["seq_ids"], ["slot_mapping", "active_block_table"])},
    ),
    PlanCase(_BLOCKS, {"pa_num_blocks": 7}, {"blocks": ((6, 8), (7, 8))}),
    PlanCase(_BLOCKS, {"pa_block_size": 16}, {"blocks": ((6, 8), (6, 16))}),
    PlanCase(
        _BLOCKS | {"enable_bucketing": True},
        {"is_prefix_caching": True, "prefix_buckets": [16, 32]},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_32x0", "context_encoding_32x16", "context_encoding_32x32", "token_generation_32"],
            ),
            "prefix caching": (False, True),
        },
    ),
    PlanCase(
        {"batch_size": 4, "enable_bucketing": True, "token_generation_buckets": [32]},
        {"token_generation_batches": [2]},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_32", "token_generation_4x32", "token_generation_2x32"],
            ),
            "decode rows": (4, 2),
        },
    ),
    PlanCase(
        {},
        {"seq_len": 64},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_64", "token_generation_64"],
            ),
            "KV positions": (32, 64),
            "prompt": (32, 64),
            "sequence": (32, 64),
        },
    ),
    PlanCase(
        {"max_new_tokens": 8},
        {"max_context_length": 24},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_24", "token_generation_32"],
            ),
            "prompt": (32, 24),
        },
    ),
    PlanCase({}, {"max_new_tokens": 7}, {"new tokens": (None, 7)}),
    PlanCase(
        {},
        {"max_length": 96},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_32", "token_generation_96"],
            ),
            "KV positions": (32, 96),
        },
    ),
    PlanCase(
        {"seq_len": 256},
        {"enable_bucketing": True},
        {
            "executables": (
                ["context_encoding_256", "token_generation_256"],
                ["context_encoding_128", "context_encoding_256", "token_generation_128", "token_generation_256"],
            ),
        },
    ),
    PlanCase(
        {"enable_bucketing": True},
        {"context_encoding_buckets": [8, 32], "token_generation_buckets": [16, 32]},
        {
            "executables": (
                ["context_encoding_32", "token_generation_32"],
                ["context_encoding_8", "context_encoding_32", "token_generation_16", "token_generation_32"],
            ),
        },
    ),
    PlanCase({}, {"torch_dtype": "bfloat16"}, {"weights": ("float32", "bfloat16")}),
    PlanCase({}, {"tp_degree": 2}, {"queries": (32, 16)}),
    # The graph of one rank may be the same: it returns its logits anyway, for the golden check.
    PlanCase(
        {"on_device_sampling_config": {}},
        {"output_logits": True},
        {"outputs": (["tokens", "rank_logits"], ["tokens", "logits"])},
    ),
)

GRAPH_CASES: Final = (
    GraphCase({}, {"on_device_sampling_config": {}}),
    GraphCase({}, {"fused_qkv": True}),
    GraphCase({"tp_degree": 2}, {"rpl_reduce_dtype": "bfloat16"}),
    GraphCase({"cast_type": "as-declared"}, {"attention_dtype": "bfloat16"}),
    GraphCase({"tp_degree": 2}, {"vocab_parallel": True}),
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
