"""Graphs for long sequences: the cache grows with them, and nothing else in a graph whose steps stay as large."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bundle.abi.submodels import SubmodelName
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_state, describe_submodel
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model

SLOTS, STEP, BLOCK = 2, 512, 32
LENGTHS = (4096, 8192)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("LlamaForCausalLM", SIZES),
    "blocks": ("LlamaForCausalLM", SIZES),
    "ring": ("MistralForCausalLM", SIZES | {"head_dim": 8, "sliding_window": 100}),
    "slopes": ("BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "num_hidden_layers": 1}),
}


def make_long_spec(tiny: TinyModel, layout: str, length: int) -> GraphSpec:
    blocks = {"num_blocks": SLOTS * length // BLOCK, "block_tokens": BLOCK} if layout == "blocks" else {}
    options: dict[str, Any] = blocks or {"largest_step": STEP}
    return tiny.spec(max_length=length, num_slots=SLOTS, reads_context=True, skips_idle=True, **options)


def count_state_bytes(spec: GraphSpec) -> int:
    return sum(math.prod(tensor.shape) * 4 for tensor in describe_state(spec).tensors)


def measure(tiny: TinyModel, spec: GraphSpec, kind: SubmodelName, bucket: int) -> tuple[int, int]:
    """Operators of a graph, and the most entries of a tensor in it that is no cache."""
    graph = export_submodel(spec, tiny.plan(), describe_submodel(spec, kind, bucket)).program.graph
    caches = {tensor.shape for tensor in describe_state(spec).tensors}
    made = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return len(graph.nodes), max(tensor.numel() for tensor in made if tuple(tensor.shape) not in caches)


@pytest.mark.parametrize("layout", MODELS)
def test_only_the_cache_grows_with_the_longest_sequence(layout: str, tmp_path: Path) -> None:
    architecture, attributes = MODELS[layout]
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture)
    short, long = (make_long_spec(tiny, layout, length) for length in LENGTHS)
    for kind, buckets in (("context_encoding", (STEP, STEP)), ("token_generation", LENGTHS)):
        sizes = [measure(tiny, spec, kind, bucket) for spec, bucket in zip((short, long), buckets, strict=True)]
        assert sizes[0] == sizes[1], kind
    # A prompt in one step has no tensor of tokens by tokens.
    (_, before), (_, after) = (measure(tiny, spec, "context_encoding", spec.max_length) for spec in (short, long))
    assert after == 2 * before
    grown = count_state_bytes(long) - count_state_bytes(short)
    # Keys and values of slots and the scratch slot, or of blocks.
    kv_heads, copies = (4 if layout == "slopes" else 2), SLOTS if layout == "blocks" else SLOTS + 1
    positions = 0 if layout == "ring" else LENGTHS[1] - LENGTHS[0]
    assert grown == 2 * copies * positions * kv_heads * 8 * 4
