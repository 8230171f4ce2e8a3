"""The documents' own examples keep every rule; what an example leaves to its reader is filled in."""

import itertools
from typing import Any

import pytest

from compiler_svc.config import resolve_config
from targets.registry import TARGETS

#: As many paths as the example file's tree has, of at most four choices.
MEDUSA_TREE = [
    list(path)
    for depth, widths in enumerate(((7,), (3, 3), (2, 3, 3), (2, 2, 3, 3)), 1)
    for path in itertools.product(*(range(width) for width in widths))
    if depth < 4 or path[0] == 0
][:63]

EAGLE: dict[str, Any] = {
    "batch_size": 1,
    "enable_eagle_speculation": True,
    "enable_fused_speculation": True,
    "max_context_length": 1024,
    "max_length": 1024,
    "on_device_sampling_config": {"temperature": 0.7, "top_k": 50, "top_p": 1.0},
    "seq_len": 1024,
    "speculation_length": 5,
    "tp_degree": 32,
    "trace_tokengen_model": False,
}
EAGLE_DRAFT = EAGLE | {
    "trace_tokengen_model": True,
    "enable_fused_speculation": False,
    "is_eagle_draft": True,
    "sequence_parallel_enabled": False,
}

PREFIXES = {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_num_blocks": 1024, "pa_block_size": 32}
PREFIX_BUCKETS = {"seq_len": 2048, "context_encoding_buckets": [512, 1024, 2048], "prefix_buckets": [512, 1024]}
BUCKETS = {"seq_len": 8192, "context_encoding_buckets": [1024, 2048, 4096], "token_generation_buckets": [8192]}
QUANTIZED = {"quantized": True, "quantized_checkpoints_path": "/home/ubuntu/models/Llama-3.1-8B-quantized"}
EXAMPLES: tuple[dict[str, Any], ...] = (
    {"logical_nc_config": 2},
    {"sequence_parallel_enabled": True},
    {"batch_size": 2},
    {"on_device_sampling_config": {"global_topk": 256}},
    {"on_device_sampling_config": {"dynamic": True}},
    {"on_device_sampling_config": {"top_k": 5}},
    {"fused_qkv": True},
    {"enable_bucketing": True},
    BUCKETS | {"enable_bucketing": True},
    QUANTIZED | {"quantization_dtype": "int8", "quantization_type": "per_tensor_symmetric"},
    {"kv_cache_quant": True},
    {"speculation_length": 5, "trace_tokengen_model": False},
    {"is_medusa": True, "medusa_speculation_length": 64, "num_medusa_heads": 4, "medusa_tree": MEDUSA_TREE},
    PREFIXES,
    PREFIXES | PREFIX_BUCKETS | {"enable_bucketing": True, "token_generation_buckets": [2048]},
    {"lora_config": {"max_loras": 2, "lora_ckpt_paths": {"one": "adapters/one", "two": "adapters/two"}}},
)


@pytest.mark.parametrize("neuron_config", EXAMPLES, ids=lambda example: "-".join(example)[:40])
def test_examples_of_one_model(neuron_config: dict[str, Any]) -> None:
    resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=None, target="trn2")


#: A draft may be a copy of its target.
COPIED = EAGLE | {"enable_eagle_speculation": False, "async_mode": True, "batch_size": 4}


@pytest.mark.parametrize(
    ("target", "draft"), [(EAGLE, EAGLE_DRAFT), (COPIED, COPIED | {"enable_fused_speculation": False})]
)
def test_examples_of_fused_speculation(target: dict[str, Any], draft: dict[str, Any]) -> None:
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    document = {"neuron_config": target, "fused_spec_config": fused_spec_config}
    resolve_config(document, checkpoint_dtype=None, target="trn2")


def test_degrees_are_those_of_the_newest_document() -> None:
    assert TARGETS["trn2"].tp_degrees == (1, 2, 4, 8, 16, 32, 64)
    assert TARGETS["inf2"].tp_degrees == (1, 2, 4, 8, 24)
    assert TARGETS["trn1"].tp_degrees == (1, 2, 8, 16, 32)
    assert TARGETS["trn3"].tp_degrees == TARGETS["trn2"].tp_degrees
