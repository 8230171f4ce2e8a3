"""Changes logits before a token is picked, as the processors of Hugging Face's `generate` do and in their order.

logit_bias, repetition_penalty, frequency_penalty and presence_penalty, no_repeat_ngram_size, bad words, allowed tokens,
min_new_tokens, what a constraint allows, forced first tokens; then, by `sampling`, temperature, top_k and top_p; then
min_p and typical_p.

Each function but the first takes one row, and what it needs to know of the row's sequence: the tokens of its prompt,
those that were generated. Token ids are int64, logits f32 [V]; results are new tensors. What is excluded gets negative
infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from execution.candidates import find_likeliest
from execution.sampling import candidates, draw, is_greedy, is_valid, mark_invalid, score
from execution.sampling_parameters import SamplingParams
from execution.step import ProcessedRow

_EXCLUDED: Final = float("-inf")
#: Rows of up to so many candidates are drawn together.
_FEW: Final = 1 << 11
#: Of others, noise is computed for so many at a time: its two hundred operations take twice as long outside the cache.
_PART: Final = 1 << 15


def sample_on_host(
    logits: Tensor, sampling_params: Tensor, chance: Tensor, rows: Sequence[ProcessedRow], global_topk: int
) -> Tensor:
    """Picks a token for each row as `sampling.sample` does, and for `rows` as they ask.

    Arguments and result are as in `sample`; `logits`, f32 [N, V], stay as they are. Here rows need not have equally
    many candidates: one by which nothing is excluded takes no order of the vocabulary.
    """
    valid, asked = is_valid(logits), {row.row: row for row in rows}
    if asked or not valid.all():
        logits = torch.where(valid, logits, 0.0)
    for number, row in asked.items():
        logits[number] = process(logits[number], row)
    tokens = find_likeliest(logits)
    drawn = (~is_greedy(sampling_params)).nonzero()[:, 0].tolist()
    found = []
    for number in drawn:
        own = slice(number, number + 1)
        ids, scores = _find_candidates(logits[own], sampling_params[own], asked.get(number), global_topk, chance.dtype)
        if len(ids) > _FEW and chance.dtype == torch.int32:
            ids, scores = _choose_of_parts(ids, scores, sampling_params[own], chance[own])
        found.append((ids, scores))
    if drawn:
        padded_ids = pad_sequence([ids for ids, _ in found], batch_first=True)
        padded = pad_sequence([scores for _, scores in found], batch_first=True, padding_value=_EXCLUDED)
        tokens[drawn] = draw(padded_ids, padded, sampling_params[drawn], chance[drawn])
    return mark_invalid(tokens, valid)


def _choose_of_parts(ids: Tensor, scores: Tensor, sampling_params: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps of each part of a row's candidates the one that would be drawn of it: the row's token is one of these."""
    parts = zip(torch.split(ids, _PART), torch.split(scores, _PART), strict=True)
    kept = torch.cat([draw(some, values[None], sampling_params, chance) for some, values in parts])
    places = (ids == kept[:, None]).to(torch.int8).argmax(dim=-1)
    return kept, scores[places]


def _find_candidates(
    logits: Tensor, sampling_params: Tensor, asked: ProcessedRow | None, global_topk: int, chance: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The tokens that a row can draw, ids int32 [K], and their scores, f32 [K].

    Takes one row of logits and parameters; an inverse distribution function takes its candidates in order.
    """
    top_k, top_p = sampling_params[0, :2].tolist()
    is_cut = asked is not None and (asked.sampling.min_p > 0 or asked.sampling.typical_p < 1)
    if not (global_topk or top_k > 0 or top_p < 1 or is_cut) and chance == torch.int32:
        scores = score(logits, logits.amax(dim=-1, keepdim=True), sampling_params)
        return torch.arange(logits.shape[-1], dtype=torch.int32), scores[0]
    limit = min((int(one) for one in (top_k, global_topk) if one > 0), default=0)
    ids, scores = (one[0] for one in candidates(logits, sampling_params, limit))
    if asked is not None and is_cut:
        ids, scores = cut(ids, scores, asked.sampling)
    count = int((scores > _EXCLUDED).sum())
    return ids[:count], scores[:count]


def process(logits: Tensor, row: ProcessedRow) -> Tensor:
    """Makes of a row's logits those that temperature, top_k and top_p come to, by what the row asks for."""
    asked, generated = row.sampling, _read_tokens(row.generated)
    if len(generated) < len(asked.forced_token_ids):
        return force_token(logits, asked.forced_token_ids[len(generated)])
    if asked.logit_bias:
        logits = add_bias(logits, asked.logit_bias)
    tokens = torch.cat((_read_tokens(row.prompt), generated))
    if asked.repetition_penalty != 1:
        logits = penalize_repetition(logits, tokens, asked.repetition_penalty)
    if asked.frequency_penalty or asked.presence_penalty:
        logits = penalize_frequency(logits, generated, asked.frequency_penalty, asked.presence_penalty)
    left = logits
    if asked.no_repeat_ngram_size:
        left = exclude_repeated_ngrams(left, tokens, asked.no_repeat_ngram_size)
    if asked.bad_words:
        left = exclude_words(left, tokens, asked.bad_words)
    if row.ends:
        left = exclude_tokens(left, row.ends)
    if asked.allowed_token_ids:
        left = allow_only(left, asked.allowed_token_ids)
    if row.mask is not None:
        logits, left = apply_mask(logits, row.mask), apply_mask(left, row.mask)
    if left.amax() > _EXCLUDED:
        return left
    left = allow_only(logits, asked.allowed_token_ids) if asked.allowed_token_ids else logits
    return left if left.amax() > _EXCLUDED else logits


def cut(ids: Tensor, scores: Tensor, asked: SamplingParams) -> tuple[Tensor, Tensor]:
    """Drops candidates of one row behind top_k and top_p, and puts them last.

    Arguments and results are as those of `sampling.candidates`: ids int32 [K], scores f32 [K].
    """
    weights = scores.exp()
    if asked.min_p:
        weights = cut_below(weights, asked.min_p)
    if asked.typical_p < 1:
        weights = cut_untypical(weights, asked.typical_p)
    order = (weights == 0).to(torch.int8).argsort(stable=True)
    return ids[order], scores.where(weights > 0, _EXCLUDED)[order]


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
    ids, counts = torch.unique(generated, return_counts=True)
    return logits.index_add(0, ids, counts * -frequency - presence)


def exclude_repeated_ngrams(logits: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Excludes the tokens that would repeat `size` tokens in a row of `tokens` [T], prompt and generated ones."""
    if len(tokens) < size:
        return logits
    ngrams = tokens.unfold(0, size, 1)
    is_newest = (ngrams[:, :-1] == tokens[len(tokens) - size + 1 :]).all(dim=-1)
    return logits.index_fill(0, ngrams[is_newest, -1], _EXCLUDED)


def exclude_words(logits: Tensor, tokens: Tensor, words: Sequence[Sequence[int]]) -> Tensor:
    """Excludes the last token of each word, a list of token ids, where `tokens` [T] end with the ones before it."""
    newest = tokens[-max(map(len, words)) :].tolist()
    ends = [word[-1] for word in words if newest[len(newest) - len(word) + 1 :] == list(word[:-1])]
    return logits.index_fill(0, torch.tensor(ends, dtype=torch.int64), _EXCLUDED)


def allow_only(logits: Tensor, allowed: Sequence[int]) -> Tensor:
    """Excludes all tokens but the allowed ones."""
    ids = torch.tensor(allowed, dtype=torch.int64)
    return torch.full_like(logits, _EXCLUDED).index_copy(0, ids, logits[ids])


def apply_mask(logits: Tensor, mask: bytes) -> Tensor:
    """Excludes the tokens whose bits are not set in `mask`, int32 words of 32 tokens each."""
    words = torch.frombuffer(bytearray(mask), dtype=torch.int32)
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.view(-1)[: len(logits)] == 0, _EXCLUDED)


def exclude_tokens(logits: Tensor, excluded: Sequence[int]) -> Tensor:
    """Excludes tokens, such as those that end a sequence while it has fewer than min_new_tokens."""
    return logits.index_fill(0, torch.tensor(excluded, dtype=torch.int64), _EXCLUDED)


def force_token(logits: Tensor, token: int) -> Tensor:
    """Excludes all tokens but one, whose logit becomes 0."""
    return torch.full_like(logits, _EXCLUDED).index_fill(0, torch.tensor([token]), 0.0)


def cut_below(weights: Tensor, min_p: float) -> Tensor:
    """Drops tokens with less than a share of the likeliest one's weight; `weights`, f32 [K], are as in `sampling`."""
    return weights.where(weights >= min_p * weights.amax(), 0.0)


def cut_untypical(weights: Tensor, typical_p: float) -> Tensor:
    """Keeps the tokens whose information is closest to the expected one, up to the one that crosses `typical_p`.

    `weights` are unnormalized, f32 [K]. A token as typical as the last one that is kept is kept, too.
    """
    probabilities = weights / weights.sum()
    information = -probabilities.log()
    expected = (probabilities * information).nansum()
    distance, order = (information - expected).abs().sort()
    last = (probabilities[order].cumsum(0) < typical_p).sum().clamp(max=len(weights) - 1)
    return weights.index_fill(0, order[distance > distance[last]], 0.0)


def _read_tokens(tokens: bytes) -> Tensor:
    # A buffer of no bytes is refused.
    return torch.frombuffer(bytearray(tokens), dtype=torch.int32).long() if tokens else torch.empty(0).long()
