"""Each sampling parameter through the services, beside `model.generate` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from kiln_client.hf import KilnForCausalLM
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from execution.sampling_parameters import PARAMETERS

PROMPTS: Final = ("Once upon a time", "Tell me a story about a fox, and", "The little")
NUM_TOKENS: Final = 16
#: What lets a draw among the likeliest tokens be only one: then transformers and the server draw the same.
NEARLY_GREEDY: Final = 1e-4


class Processed(LogitsProcessor):  # type: ignore[misc]
    """Changes logits [rows, vocabulary] by what transformers has no parameter for."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._change = change

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._change(input_ids, scores)


def penalized(length: int, frequency: float, presence: float) -> Callable[[Tensor, Tensor], Tensor]:
    def change(input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids[:, length:], torch.ones_like(scores))
        return scores - frequency * counts - presence * (counts > 0)

    return change


def forced(length: int, tokens: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def change(input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - length
        if step >= len(tokens):
            return scores
        return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor(tokens[step : step + 1]), 0.0)

    return change


def processed(*changes: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(map(Processed, changes))}


#: Tokens that the greedy text has.
A, COMMA, END = 265, 18, 3
#: By row: what is asked of the server, and what of transformers by the length of the prompts, if its words are others.
CASES: Final[dict[str, list[tuple[dict[str, Any], Callable[[int], dict[str, Any]] | None]]]] = {
    "temperature": [({"do_sample": True, "temperature": NEARLY_GREEDY}, None)],
    "top_k": [({"do_sample": True, "top_k": 1}, None)],
    "top_p": [({"do_sample": True, "top_p": NEARLY_GREEDY}, None)],
    "min_p": [({"do_sample": True, "min_p": 1.0}, None)],
    "typical_p": [({"do_sample": True, "top_k": 0, "typical_p": NEARLY_GREEDY}, None)],
    "repetition_penalty": [({"repetition_penalty": value}, None) for value in (1.1, 1.5, 0.8)],
    "no_repeat_ngram_size": [({"no_repeat_ngram_size": size}, None) for size in (1, 2, 3)],
    "bad_words": [
        ({"bad_words_ids": [[A], [COMMA]]}, None),
        ({"bad_words_ids": [[A], [COMMA, A], [END]]}, None),
        ({"suppress_tokens": [A, COMMA]}, None),
    ],
    "min_new_tokens": [
        ({"min_new_tokens": 12, "eos_token_id": [2, 3, COMMA]}, None),
        ({"min_length": 24}, None),
        ({"min_new_tokens": 50}, None),
    ],
    "logit_bias": [({"sequence_bias": {(A,): 8.0, (COMMA,): -50.0}}, None)],
    "allowed_token_ids": [
        (
            {"allowed_token_ids": [*range(200, 400)]},
            lambda _: {"prefix_allowed_tokens_fn": lambda row, ids: [*range(200, 400)]},
        )
    ],
    "forced_token_ids": [
        ({"forced_token_ids": [A, 300, 301]}, lambda length: processed(forced(length, [A, 300, 301])))
    ],
    "frequency_penalty": [({"frequency_penalty": 1.5}, lambda length: processed(penalized(length, 1.5, 0)))],
    "presence_penalty": [({"presence_penalty": 1.9}, lambda length: processed(penalized(length, 0, 1.9)))],
    "seed": [({"seed": 5}, lambda _: {})],
}


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[str, Tensor]:
    return dict(tokenizer([*PROMPTS], return_tensors="pt", padding=True))


def test_every_parameter_has_a_case() -> None:
    assert CASES.keys() == PARAMETERS.keys()


@pytest.mark.parametrize(
    ("asked", "words"),
    [pytest.param(*case, id=f"{name}-{index}") for name, cases in CASES.items() for index, case in enumerate(cases)],
)
def test_tokens_are_those_of_transformers(
    served: KilnForCausalLM,
    reference: Any,
    prompts: dict[str, Tensor],
    asked: dict[str, Any],
    words: Callable[[int], dict[str, Any]] | None,
) -> None:
    common = {**prompts, "max_new_tokens": NUM_TOKENS, "do_sample": False}
    own = asked if words is None else words(prompts["input_ids"].shape[1])
    expected = reference.generate(**common | own)
    assert served.generate(**common | asked).tolist() == expected.tolist()


def test_a_parameter_changes_the_tokens(served: KilnForCausalLM, prompts: dict[str, Tensor]) -> None:
    """Else the test above would show nothing; those that only narrow a draw are in the next one."""
    common = {**prompts, "max_new_tokens": NUM_TOKENS, "do_sample": False}
    plain = served.generate(**common).tolist()
    unchanged = {
        name
        for name, cases in CASES.items()
        if not cases[0][0].get("do_sample") and served.generate(**common | cases[0][0]).tolist() == plain
    }
    assert unchanged == {"seed"}


#: What keeps some of the tokens of each step.
CUTS: Final = (
    {"top_k": 4},
    {"top_k": 0, "top_p": 0.6},
    {"top_k": 0, "min_p": 0.2},
    {"top_k": 0, "typical_p": 0.4},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "bad_words_ids": [[A]]},
)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_are_among_what_transformers_keeps(
    served: KilnForCausalLM, prompts: dict[str, Tensor], cut: dict[str, Any]
) -> None:
    """The scores are those of transformers' own processors, of the logits that the server drew from."""
    asked = {**prompts, "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 4, "eos_token_id": None, **cut}
    drawn = served.generate(**asked, seed=3, return_dict_in_generate=True, output_scores=True)
    tokens = drawn.sequences[:, prompts["input_ids"].shape[1] :]
    assert tokens.shape == (12, 8)
    scores = torch.stack(drawn.scores, dim=1)
    assert (scores.gather(2, tokens[:, :, None]) > float("-inf")).all()
    assert len({tuple(row) for row in tokens.tolist()}) > len(PROMPTS)
    again = served.generate(**asked, seed=3)
    assert again.tolist() == drawn.sequences.tolist()
