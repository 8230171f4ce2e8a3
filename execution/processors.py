"""Changes logits before a token is picked, as the processors of Hugging Face's `generate` do and in their order.

logit_bias, repetition_penalty, frequency_penalty and presence_penalty, no_repeat_ngram_size, bad words, allowed tokens,
min_new_tokens, forced first tokens; then, by `sampling`, temperature, top_k and top_p; then min_p and typical_p.

Each function takes one row and what it needs to know of the row's sequence: tokens of its prompt, tokens that were
generated. Token ids are int64, logits f32 [V]; results are new tensors. What is excluded gets negative infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

_EXCLUDED: Final = float("-inf")


def add_bias(logits: Tensor, biases: Mapping[int, float]) -> Tensor:
    """Adds a number to the logits of some tokens."""
    ids, added = torch.tensor(list(biases)), torch.tensor(list(biases.values()), dtype=logits.dtype)
    return logits.index_add(0, ids, added)


def penalize_repetition(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Divides the logits of `tokens` [T], those of the prompt and generated ones, and multiplies negative ones."""
    found = logits[tokens]
    return logits.index_put((tokens,), torch.where(found < 0, found * penalty, found / penalty))


def penalize_frequency(logits: Tensor, generated: Tensor, frequency: float, presence: float) -> Tensor:
    """Takes `frequency` off for each time that a token was generated, and `presence` if it was at all."""
    counts = torch.zeros_like(logits).index_add(0, generated, torch.ones(len(generated)))
    return logits - frequency * counts - presence * (counts > 0)


def exclude_repeated_ngrams(logits: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Excludes the tokens that would repeat `size` tokens in a row of `tokens` [T], prompt and generated ones."""
    if len(tokens) < size:
        return logits
    ngrams = tokens.unfold(0, size, 1)
    is_newest = (ngrams[:, :-1] == tokens[len(tokens) - size + 1 :]).all(dim=-1)
    return logits.index_fill(0, ngrams[is_newest, -1], _EXCLUDED)


def exclude_words(logits: Tensor, tokens: Tensor, words: Sequence[Sequence[int]]) -> Tensor:
    """Excludes the last token of each word, a list of token ids, where `tokens` [T] end with the ones before it."""
    newest = tokens.tolist()[len(tokens) - max(map(len, words), default=0) :]
    ends = [word[-1] for word in words if newest[len(newest) - len(word) + 1 :] == list(word[:-1])]
    return logits.index_fill(0, torch.tensor(ends, dtype=torch.int64), _EXCLUDED)


def allow_only(logits: Tensor, allowed: Sequence[int]) -> Tensor:
    """Excludes all tokens but the allowed ones."""
    ids = torch.tensor(allowed, dtype=torch.int64)
    return torch.full_like(logits, _EXCLUDED).index_copy(0, ids, logits[ids])


def exclude_tokens(logits: Tensor, excluded: Sequence[int]) -> Tensor:
    """Excludes tokens, such as those that end a sequence while it has fewer than min_new_tokens."""
    return logits.index_fill(0, torch.tensor(excluded, dtype=torch.int64), _EXCLUDED)


def force_token(logits: Tensor, token: int) -> Tensor:
    """Excludes all tokens but one, whose logit becomes 0."""
    return torch.full_like(logits, _EXCLUDED).index_fill(0, torch.tensor([token]), 0.0)


def cut_below(weights: Tensor, min_p: float) -> Tensor:
    """Drops tokens with less than a share of the likeliest one's weight; `weights` are as in `sampling.weigh`, f32 [K]."""
    return weights.where(weights >= min_p * weights.amax(), 0.0)


def cut_untypical(weights: Tensor, typical_p: float) -> Tensor:
    """Keeps the tokens whose information is closest to the expected one, up to the one that crosses `typical_p`.

    `weights` are as in `sampling.weigh`, f32 [K]. A token as typical as the last one that is kept is kept, too.
    """
    probabilities = weights / weights.sum()
    information = -probabilities.log()
    expected = (probabilities * information).nansum()
    distance, order = (information - expected).abs().sort()
    last = (probabilities[order].cumsum(0) < typical_p).sum().clamp(max=len(weights) - 1)
    return weights.index_fill(0, order[distance > distance[last]], 0.0)
