"""Prompts that begin alike, from the compile to the usage that a client gets, against transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.checkpoints.tiny_models import draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import Reference, assert_same_tokens
from tests.servers.stack import Stack, token_request, tokens_of

GEOMETRY = GEOMETRIES["gqa4-tied-llama3"] | {"max_position_embeddings": 4096}
CONFIG = {
    "torch_dtype": "float32",
    "enable_bucketing": True,
    "is_continuous_batching": True,
    "ctx_batch_size": 1,
    "is_block_kv_layout": True,
    "pa_block_size": 32,
    "on_device_sampling_config": {"dynamic": True},
    "seq_len": 608,
    "max_context_length": 576,
    "batch_size": 4,
    "pa_num_blocks": 96,
    "context_encoding_buckets": [32, 512],
    "token_generation_buckets": [608],
    "is_prefix_caching": True,
    "prefix_buckets": [512],
}


def generate(stack: Stack, ids: list[int]) -> tuple[list[int], int, int]:
    """Generates greedily; the tokens, those of the prompt that the cache held, and those that steps computed."""
    events = list(stack.generation().Generate(token_request("cached", ids, 8, temperature=0.0)))
    usage = events[-1].finished.usage
    steps = [one for one in usage.buckets if one.submodel == "context_encoding"]
    num_computed = sum(one.steps * one.bucket[0] - one.padding_tokens for one in steps)
    return tokens_of(events), usage.cached_prompt_tokens, num_computed


def test_what_64_requests_share_is_computed_once(stack: Stack) -> None:
    """Over 4 slots; their own ends fill the smaller bucket, so that none of what is shared moves into it."""
    path = stack.new_model("cached")
    reference = Reference(path, write_tiny_model(path, GEOMETRY).model)
    stack.provide("cached", path, {"neuron_config": CONFIG})
    shared = draw_tokens(512, seed=1)
    prompts = [[*shared, *draw_tokens(32, seed=100 + number)] for number in range(64)]
    with stack.deployed("cached"), ThreadPoolExecutor(len(prompts)) as pool:
        tokens, num_cached, num_computed = zip(*pool.map(partial(generate, stack), prompts), strict=True)
    for prompt, answer in list(zip(prompts, tokens, strict=True))[::8]:
        assert_same_tokens(answer, reference.greedy(prompt, 8))
    assert sorted(num_cached) == [0] + [512] * 63
    assert sum(num_computed) == 512 + 64 * 32
