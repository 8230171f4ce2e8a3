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

EXAMPLES: tuple[dict[str, Any], ...] = (
    {"logical_nc_config": 2},
    {"sequence_parallel_enabled": True},
    {"batch_size": 2},
    {"on_device_sampling_config": {"global_topk": 256}},
    {"on_device_sampling_config": {"dynamic": True}},
    {"on_device_sampling_config": {"top_k": 5}},
    {"fused_qkv": True},
    {"enable_bucketing": True},
    {
        "seq_len": 8192,
        "enable_bucketing": True,
        "context_encoding_buckets": [1024, 2048, 4096],
        "token_generation_buckets": [8192],
    },
    {
        "quantized": True,
        "quantized_checkpoints_path": "/home/ubuntu/models/Llama-3.1-8B-quantized",
        "quantization_dtype": "int8",
        "quantization_type": "per_tensor_symmetric",
    },
    {"kv_cache_quant": True},
    {"speculation_length": 5, "trace_tokengen_model": False},
    {"is_medusa": True, "medusa_speculation_length": 64, "num_medusa_heads": 4, "medusa_tree": MEDUSA_TREE},
    {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_num_blocks": 1024, "pa_block_size": 32},
    {
        "seq_len": 2048,
        "is_prefix_caching": True,
        "is_block_kv_layout": True,
        "pa_num_blocks": 1024,
        "pa_block_size": 32,
        "enable_bucketing": True,
        "context_encoding_buckets": [512, 1024, 2048],
        "prefix_buckets": [512, 1024],
        "token_generation_buckets": [2048],
    },
    {"lora_config": {"max_loras": 2, "lora_ckpt_paths": {"one": "adapters/one", "two": "adapters/two"}}},
)


@pytest.mark.parametrize("neuron_config", EXAMPLES, ids=lambda example: "-".join(example)[:40])
def test_examples_of_one_model(neuron_config: dict[str, Any]) -> None:
    resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=None, target="trn2")


def test_the_example_of_fused_speculation() -> None:
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": EAGLE_DRAFT}}
    document = {"neuron_config": EAGLE, "fused_spec_config": fused_spec_config}
    draft = resolve_config(document, checkpoint_dtype=None, target="trn2").config.fused_spec_config
    assert draft is not None
    assert draft.draft_config is not None
    assert draft.draft_config.neuron_config.is_eagle_draft


def test_a_draft_may_be_a_copy_of_its_target() -> None:
    target = EAGLE | {"enable_eagle_speculation": False, "async_mode": True, "batch_size": 4}
    draft = target | {"enable_fused_speculation": False}
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    resolve_config(
        {"neuron_config": target, "fused_spec_config": fused_spec_config}, checkpoint_dtype=None, target="trn2"
    )


def test_degrees_are_those_of_the_newest_document() -> None:
    assert TARGETS["trn2"].tp_degrees == (1, 2, 4, 8, 16, 32, 64)
    assert TARGETS["inf2"].tp_degrees == (1, 2, 4, 8, 24)
    assert TARGETS["trn1"].tp_degrees == (1, 2, 8, 16, 32)
    assert TARGETS["trn3"].tp_degrees == TARGETS["trn2"].tp_degrees


@pytest.mark.parametrize("tp_degree", [1, 3, 5, 6, 24, 63, 64])
def test_cpu_takes_every_degree(tp_degree: int) -> None:
    resolve_config({"neuron_config": {"tp_degree": tp_degree}}, checkpoint_dtype=None, target="cpu")


def test_the_quantized_mlp_kernel_chooses_its_quantization() -> None:
    kernels = {"mlp_kernel_enabled": True, "quantized_mlp_kernel_enabled": True}
    config = resolve_config({"neuron_config": kernels}, checkpoint_dtype=None, target="trn2").config.neuron_config
    assert (config.quantization_type, config.quantization_dtype) == ("per_channel_symmetric", "f8e4m3")
    config = resolve_config({}, checkpoint_dtype=None, target="trn2").config.neuron_config
    assert (config.quantization_type, config.quantization_dtype) == ("per_tensor_symmetric", "int8")
