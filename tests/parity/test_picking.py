"""Ranks that see only their part of the vocabulary pick the tokens that one rank picks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest

from tests.parity.bundles import Bundles
from tests.parity.cases import NUM_SLOTS, Case, picking_parameters
from tests.parity.reference import assert_same_tokens, draw_prompt
from tests.servers.stack import Stack, token_request, tokens_of

NUM_TOKENS = 48
#: Every way of drawing: among all candidates, the k best, the probable ones, and both.
SAMPLINGS = [
    {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 11},
    {"temperature": 1.3, "top_k": 7, "top_p": 1.0, "seed": 12},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.6, "seed": 13},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 14},
]


@pytest.mark.parametrize(("case", "single"), picking_parameters())
def test_tokens_are_those_of_one_rank(bundles: Bundles, stack: Stack, case: Case, single: Case) -> None:
    prompts = [draw_prompt(length) for length in (1, 9, 32)]
    picked = {}
    for one in (case, single):
        with bundles.deployed(one) as deployment, ThreadPoolExecutor(NUM_SLOTS) as pool:
            ask = partial(pool.submit, generate, stack, deployment)
            drawing = [ask(ids, sampling) for ids, sampling in product(prompts, SAMPLINGS)]
            greedy = [ask(ids, {"temperature": 0.0}) for ids in prompts]
            picked[one] = [tokens.result() for tokens in drawing]
        for ids, tokens in zip(prompts, greedy, strict=True):
            assert_same_tokens(tokens.result(), bundles.reference(case.geometry).greedy(ids, NUM_TOKENS))
    # Sums over ranks round differently, which moves a draw that falls on the border of two tokens.
    same = sum(ours == theirs for ours, theirs in zip(picked[case], picked[single], strict=True))
    assert same >= len(picked[case]) - 1
    assert len({tuple(tokens) for tokens in picked[case]}) == len(picked[case])


def generate(stack: Stack, deployment: str, ids: list[int], sampling: dict[str, float]) -> list[int]:
    return tokens_of(list(stack.generation().Generate(token_request(deployment, ids, NUM_TOKENS, **sampling))))
