"""Sequences of 32768 positions, compiled and served: transformers' tokens, in memory that grows with the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pytest

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from tests.checkpoints.tiny_models import write_tiny_model
from tests.parity.reference import Reference, assert_same_tokens, draw_prompt
from tests.servers.stack import Stack, token_request, tokens_of

#: Sequences, and the prompts that leave room in them.
LENGTHS: Final = {8192: 6000, 32_768: 30_000}
NUM_SLOTS: Final = 2
NUM_TOKENS: Final = 16
#: What allocators, thread stacks and the engine's lists of tokens may differ by.
SLACK_BYTES: Final = 24 << 20
#: Heads as large models have them, and the most positions that their cache has in a slot.
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 4096,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "slots": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "blocks": ("LlamaForCausalLM", {}),
    "ring": ("MistralForCausalLM", {"sliding_window": 1024}),
}


@dataclass(frozen=True)
class Measured:
    """What one bundle takes.

    Attributes:
        kv_bytes: The cache, as the runtime says.
        rank_bytes: Memory that the rank shares with no other process, after a prompt; `code_bytes`: all libraries.
    """

    kv_bytes: int
    rank_bytes: int
    code_bytes: int


def make_config(layout: str, length: int) -> dict[str, Any]:
    blocks = {"is_block_kv_layout": True, "pa_block_size": 32, "pa_num_blocks": NUM_SLOTS * length // 32}
    return {
        "neuron_config": {
            "seq_len": length,
            "max_context_length": length,
            "max_new_tokens": NUM_TOKENS,
            "batch_size": NUM_SLOTS,
            "ctx_batch_size": 1,
            "torch_dtype": "float32",
            "is_continuous_batching": True,
            "enable_bucketing": True,
            "context_encoding_buckets": [512],
            "token_generation_buckets": [length],
            "on_device_sampling_config": {"dynamic": True},
        }
        | (blocks if layout == "blocks" else {})
    }


def measure(stack: Stack, name: str, digest: str, reference: Reference, num_prompt_tokens: int) -> Measured:
    """Serves a bundle and compares what it generates behind a prompt in chunks."""
    others = stack.ranks()
    with stack.deployed(name, digest):
        (rank,) = stack.ranks() - others
        prompt = draw_prompt(num_prompt_tokens)
        request = token_request(name, prompt, NUM_TOKENS, temperature=0.0)
        tokens = tokens_of(list(stack.generation().Generate(request)))
        assert len(tokens) == NUM_TOKENS
        assert_same_tokens(tokens, reference.greedy(prompt, NUM_TOKENS))
        rank_bytes = rank.memory_full_info().uss
        kv_bytes = stack.get(name).kv_bytes
    bundle = open_bundle(Layout(stack.home / "store"), digest)
    blobs = {executable.blob for executable in bundle.manifest.executables}
    code_bytes = sum(bundle.layout.stored(blob).size_bytes for blob in blobs)
    return Measured(kv_bytes, rank_bytes, code_bytes)


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize("layout", MODELS)
def test_32768_positions(stack: Stack, layout: str) -> None:
    architecture, attributes = MODELS[layout]
    path = stack.new_model(f"long-{layout}")
    reference = Reference(path, write_tiny_model(path, SIZES | attributes, architecture=architecture).model)
    measured = []
    for length, num_prompt_tokens in LENGTHS.items():
        name = f"long-{layout}-{length}"
        digest = str(stack.compile(name, path, make_config(layout, length), level=1)["bundle"])
        measured.append(measure(stack, name, digest, reference, num_prompt_tokens))
    # Keys and values of two layers with two heads of 64 numbers; a ring has the window and a step, less one.
    position_bytes = 2 * 2 * 2 * 64 * 4
    for length, one in zip(LENGTHS, measured, strict=True):
        positions = {"slots": 3 * length, "blocks": 2 * length + 32, "ring": 3 * (1024 + 512)}[layout]
        assert one.kv_bytes == positions * position_bytes
    short, long = measured
    assert long.rank_bytes - long.kv_bytes < short.rank_bytes - short.kv_bytes + SLACK_BYTES
    assert long.code_bytes == pytest.approx(short.code_bytes, rel=0.01)
