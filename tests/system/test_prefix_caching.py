"""Prompts that begin alike, from the compile to the usage that a client gets, against transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.checkpoints.tiny_models import draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import Reference, assert_same_tokens
from tests.servers.stack import Stack, token_request, tokens_of

GEOMETRY = GEOMETRIES["gqa4-tied-llama3"] | {"max_position_embeddings": 4096}
#: Optimization levels, and whether the same runs without caching, too.
RUNS = [
    (0, False),
    pytest.param(0, True, marks=pytest.mark.slow),
    pytest.param(1, True, marks=[pytest.mark.toolchain, pytest.mark.slow]),
]
CONFIG = {
    "torch_dtype": "float32",
    "enable_bucketing": True,
    "is_continuous_batching": True,
    "ctx_batch_size": 1,
    "is_block_kv_layout": True,
    "pa_block_size": 32,
    "on_device_sampling_config": {"dynamic": True},
}


class Prefill(NamedTuple):
    """What a sequence's prompt cost, as its usage says.

    Attributes:
        num_cached: Tokens that the KV cache held.
        num_computed: Tokens that steps computed.
        buckets: Those that ran, once a step.
    """

    num_cached: int
    num_computed: int
    buckets: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def reference(stack: Stack) -> Reference:
    path = stack.new_model("long")
    return Reference(path, write_tiny_model(path, GEOMETRY).model)


def deploy(stack: Stack, name: str, reference: Reference, level: int = 0, **attributes: Any) -> None:
    stack.provide(name, reference.path, {"neuron_config": CONFIG | attributes}, level=level)
    stack.kiln("load", name, "--deployment", name)


def generate(stack: Stack, deployment: str, ids: list[int], count: int) -> tuple[list[int], Prefill]:
    """Generates greedily; returns the tokens, and what the prompt cost."""
    events = list(stack.generation().Generate(token_request(deployment, ids, count, temperature=0.0)))
    usage = events[-1].finished.usage
    steps = [one for one in usage.buckets if one.submodel == "context_encoding"]
    num_computed = sum(one.steps * one.bucket[0] - one.padding_tokens for one in steps)
    buckets = [tuple(one.bucket) for one in steps for _ in range(one.steps)]
    return tokens_of(events), Prefill(usage.cached_prompt_tokens, num_computed, buckets)


@pytest.mark.parametrize(("level", "runs_uncached"), RUNS)
def test_what_64_requests_share_is_computed_once(
    stack: Stack, reference: Reference, level: int, runs_uncached: bool
) -> None:
    """Over 4 slots; their own ends fill the smaller bucket, so that none of what is shared moves into it."""
    sizes = {"seq_len": 608, "max_context_length": 576, "batch_size": 4, "pa_num_blocks": 96}
    sizes |= {"context_encoding_buckets": [32, 512], "token_generation_buckets": [608]}
    prefixes = {"is_prefix_caching": True, "prefix_buckets": [512]}
    shared = draw_tokens(512, seed=1)
    prompts = [[*shared, *draw_tokens(32, seed=100 + number)] for number in range(64)]
    answers = {}
    for name, attributes in [("cached", prefixes), ("uncached", {})][: 1 + runs_uncached]:
        deployment = f"{name}-o{level}"
        deploy(stack, deployment, reference, level, **sizes, **attributes)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers[name] = list(pool.map(lambda ids, to=deployment: generate(stack, to, ids, 8), prompts))
        stack.kiln("unload", deployment)
    for prompt, (tokens, _) in list(zip(prompts, answers["cached"], strict=True))[::8]:
        assert_same_tokens(tokens, reference.greedy(prompt, 8))
    costs = [cost for _, cost in answers["cached"]]
    assert sorted(cost.num_cached for cost in costs) == [0] + [512] * 63
    assert sum(cost.num_computed for cost in costs) == 512 + 64 * 32
    if runs_uncached:
        assert [tokens for tokens, _ in answers["cached"]] == [tokens for tokens, _ in answers["uncached"]]
        assert sum(cost.num_computed for _, cost in answers["uncached"]) == 64 * (512 + 32)


@pytest.mark.slow
def test_worked_examples_of_the_feature_guide(stack: Stack, reference: Reference) -> None:
    """The last one NxD Inference refuses, because 1088 cached tokens do not fit 1024; Kiln moves more of them."""
    deploy(
        stack,
        "guide",
        reference,
        seq_len=2304,
        max_context_length=2048,
        batch_size=1,
        pa_num_blocks=192,
        is_prefix_caching=True,
        context_encoding_buckets=[512, 1024, 2048],
        prefix_buckets=[512, 1024],
        token_generation_buckets=[2304],
    )
    examples = [
        (1000, 0, Prefill(0, 1000, [(1024, 0)])),
        (800, 128, Prefill(128, 800, [(1024, 0)])),
        (900, 640, Prefill(640, 512, [(512, 512)])),
        (1600, 1280, Prefill(1280, 1024, [(1024, 1024)])),
    ]
    for num_tokens, num_cached, expected in examples:
        prompt = draw_tokens(num_tokens, seed=num_tokens)
        if num_cached:
            generate(stack, "guide", prompt[: num_cached + 1], 1)
        tokens, cost = generate(stack, "guide", prompt, 5)
        assert cost == expected
        assert_same_tokens(tokens, reference.greedy(prompt, 5))
        # Tokens that moved were read and not written over: who finds them gets the same.
        again, cost = generate(stack, "guide", prompt, 5)
        assert cost.num_cached == (num_tokens - 1) // 32 * 32
        assert again == tokens
    stack.kiln("unload", "guide")


@pytest.mark.slow
def test_a_salt_and_a_reset_divide_what_is_shared(stack: Stack, reference: Reference) -> None:
    sizes = {"seq_len": 160, "max_context_length": 128, "batch_size": 2, "pa_num_blocks": 16}
    buckets = {"context_encoding_buckets": [32, 128], "prefix_buckets": [96], "token_generation_buckets": [160]}
    deploy(stack, "salted", reference, is_prefix_caching=True, **sizes, **buckets)
    prompt = draw_tokens(100, seed=3)
    expected = reference.greedy(prompt, 6)

    def ask(salt: str) -> int:
        request = token_request("salted", prompt, 6, temperature=0.0)
        request.cache_salt = salt
        events = list(stack.generation().Generate(request))
        assert_same_tokens(tokens_of(events), expected)
        usage: runtime.Usage = events[-1].finished.usage
        return usage.cached_prompt_tokens

    assert [ask("a"), ask("a"), ask("b"), ask("b"), ask("")] == [0, 96, 0, 96, 0]
    prefixes = runtime.ResetKVCacheRequest(deployment_id="salted", prefix_cache=runtime.PrefixCacheScope())
    assert stack.runtime_service().ResetKVCache(prefixes).zeroed_bytes > 0
    assert [ask("a"), ask("a")] == [0, 96]
    stack.kiln("load-weights", "salted", "salted")
    assert [ask("a"), ask("a")] == [0, 96]
    stack.kiln("unload", "salted")
