"""Several sequences of one prompt, from the compile to their usage, beside requests for one and transformers."""

from __future__ import annotations

import pytest

from tests.checkpoints.tiny_models import draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import Reference, assert_same_tokens
from tests.servers.stack import Stack, token_request, tokens_of

#: A prompt of 64 tokens has three blocks before the one with its last token, which every sequence has to compute.
BLOCK_TOKENS = 16
LAYOUTS = {
    "blocks": ({"is_block_kv_layout": True, "pa_block_size": BLOCK_TOKENS, "pa_num_blocks": 32}, 3 * BLOCK_TOKENS),
    "slots": ({}, 0),
}
CONFIG = {
    "torch_dtype": "float32",
    "enable_bucketing": True,
    "is_continuous_batching": True,
    "ctx_batch_size": 1,
    "batch_size": 4,
    "seq_len": 96,
    "max_context_length": 64,
    "context_encoding_buckets": [16, 64],
    "token_generation_buckets": [96],
    "on_device_sampling_config": {"dynamic": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prompt_of_four_sequences_is_computed_once_in_blocks(stack: Stack, layout: str) -> None:
    attributes, num_shared = LAYOUTS[layout]
    path = stack.new_model(f"sequences-{layout}")
    reference = Reference(path, write_tiny_model(path, GEOMETRIES["gqa4-tied-llama3"]).model)
    stack.provide(layout, path, {"neuron_config": CONFIG | attributes}, level=0)
    prompt = draw_tokens(64, seed=5)

    def generate(count: int, **sampling: float) -> list[list[int]]:
        """The tokens of each sequence; checks what their prompts cost."""
        request = token_request(layout, prompt, 12, **sampling)
        request.num_sequences = count
        events = list(stack.generation().Generate(request))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        sequences = [[event for event in events if event.sequence_index == index] for index in range(count)]
        usages = [own[-1].finished.usage for own in sequences]
        steps = [one for usage in usages for one in usage.buckets if one.submodel == "context_encoding"]
        assert [usage.cached_prompt_tokens for usage in usages] == [0, *[num_shared] * (count - 1)]
        num_computed = sum(one.steps * one.bucket[0] - one.padding_tokens for one in steps)
        assert num_computed == 64 + (count - 1) * (64 - num_shared)
        return [tokens_of(own) for own in sequences]

    with stack.deployed(layout):
        several = generate(4, temperature=0.9, seed=7)
        assert len({tuple(tokens) for tokens in several}) == 4
        assert several == [generate(1, temperature=0.9, seed=7 + index)[0] for index in range(4)]
        for tokens in generate(4, temperature=0.0):
            assert_same_tokens(tokens, reference.greedy(prompt, 12))
