"""Picks tokens from logits, with the semantics of Hugging Face's `generate`.

It is tensor arithmetic without data-dependent shapes, so that it can be exported into an executable as well as run on
the host after one. Rows are independent: a row's token depends on its own logits, parameters and noise only.

`scores` are logits after temperature, less the largest: log probabilities but for a number that all tokens share. Those
of tokens that cannot be drawn are negative infinity.

`sample` takes whole rows of logits. If the vocabulary is divided among ranks, callers use the functions inside it: each
rank takes the top of its part, the ranks join the tops, and the token is drawn from the joined top. Equal logits give
equal tokens both ways.

A row whose logits are no numbers gets INVALID_ROW in place of a token. They are replaced before they reach arithmetic
that makes an index, so that the row fails no other one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bundle.abi.outputs import INVALID_ROW
from execution.candidates import (
    count_chosen,
    find_likeliest,
    has_wide_integers,
    index_dtype,
    is_finite,
    round_sum,
    sum_exactly,
    take_top,
)
from execution.noise import make_noise
from targets.neuron import MAX_CANDIDATES


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row; of equally likely ones, that with the lowest id.

    Takes [N, V] and returns int32 [N], with INVALID_ROW where the logits are no numbers.
    """
    return mark_invalid(find_likeliest(logits), is_valid(logits))


def is_valid(logits: Tensor) -> Tensor:
    """Tells which rows of logits [N, M] have numbers, bool [N, 1].

    None of a row's logits is NaN or infinite, but for what negative infinity excludes.
    """
    # NaN is larger than any number here, wherever it is in the row.
    return is_finite(logits.amax(dim=-1, keepdim=True))


def mark_invalid(tokens: Tensor, valid: Tensor) -> Tensor:
    """Puts INVALID_ROW in place of the tokens of invalid rows: tokens int32 [N], valid bool [N, 1]."""
    return torch.where(valid[:, 0], tokens, INVALID_ROW)


def sample(
    logits: Tensor, sampling_params: Tensor, chance: Tensor, global_topk: int, cuts: Tensor | None = None
) -> Tensor:
    """Draws one token per row: temperature, then top_k, then top_p, then `draw`.

    Args:
        logits: [N, V].
        sampling_params: f32 [N, 3]: top_k, top_p, temperature. top_k 0 sets no limit of its own. Temperature 0 or
            top_k 1 is greedy.
        chance: What decides: `noise_keys` of the ABI, int32 [N, 2], or `rand`, f32 [N, 1].
        global_topk: Only this many of the likeliest tokens are candidates; 0: all are.
        cuts: What leaves out candidates behind top_k and top_p, if anything does; see `cut`.

    Returns:
        int32 [N]; INVALID_ROW where the logits are no numbers.
    """
    valid = is_valid(logits)
    ids, scores = candidates(torch.where(valid, logits, 0.0), sampling_params, global_topk)
    if cuts is not None:
        scores = cut(scores, cuts, sampling_params)
    return mark_invalid(draw(ids, scores, sampling_params, chance), valid)


def candidates(logits: Tensor, sampling_params: Tensor, global_topk: int) -> tuple[Tensor, Tensor]:
    """Finds the tokens that can be drawn, likeliest first; arguments as in `sample`.

    Returns their ids, int32 [N, K], and scores, f32 [N, K].
    """
    logits, vocab_size = logits.float(), logits.shape[-1]
    top_logits, ids = take_top(logits, count_candidates(global_topk, vocab_size))
    sums = sum_weights(logits, top_logits[:, :1], sampling_params, vocab_size)
    return ids, score_top(top_logits, sums, sampling_params, vocab_size)


def count_candidates(global_topk: int, vocab_size: int) -> int:
    """The number of candidates: `global_topk`, or the whole vocabulary if it is 0 or exceeds `vocab_size`."""
    return min(global_topk, vocab_size) if global_topk > 0 else vocab_size


def sum_weights(logits: Tensor, largest: Tensor, sampling_params: Tensor, vocab_size: int) -> Tensor:
    """Sums the weights of a vocabulary, or of a part of it, as `candidates.sum_exactly` does.

    `logits` are f32 [N, M], of the part; `largest` is f32 [N, 1], the largest logit of the whole vocabulary.
    """
    return sum_exactly(score(logits, largest, sampling_params).exp(), vocab_size)


def score_top(top_logits: Tensor, sums: Tensor | None, sampling_params: Tensor, vocab_size: int) -> Tensor:
    """Computes scores of candidates, f32 [N, K], of which top_k and top_p exclude some.

    top_p keeps the likeliest tokens until their probabilities reach it, including the one that crosses it. The base of
    probabilities is the row's top_k tokens or, if top_k is 0, the whole vocabulary.

    Args:
        top_logits: f32 [N, K], likeliest first.
        sums: The whole vocabulary's `sum_weights`; may be None if every row has a top_k.
    """
    top_k, top_p = sampling_params[:, :1], sampling_params[:, 1:2]
    scores = score(top_logits, top_logits[:, :1], sampling_params)
    device = top_logits.device
    rank = torch.arange(top_logits.shape[-1], dtype=index_dtype(device), device=device)[None, :]
    is_kept = (top_k <= 0) | (rank < top_k)
    weights = scores.exp().where(is_kept, 0.0)
    measure = weights.sum(dim=-1, keepdim=True)
    if sums is not None:
        measure = torch.where(top_k > 0, measure, round_sum(sums, vocab_size))
    is_kept &= find_nucleus(weights, measure, top_p) | (rank == 0)
    return scores.where(is_kept, float("-inf"))


def find_nucleus(weights: Tensor, measure: Tensor, top_p: Tensor) -> Tensor:
    """Tells which candidates top_p leaves, bool [N, K]; callers keep the first one, whose share may round to nothing.

    `weights` are f32 [N, K], likeliest first; `measure`, f32 [N, 1], is the weight of what top_p is a share of.
    """
    before = weights.cumsum(dim=-1) - weights
    return (before < top_p * measure) | (top_p >= 1)


def cut(scores: Tensor, cuts: Tensor, sampling_params: Tensor) -> Tensor:
    """Excludes candidates of rows that are not greedy by the ABI's `cuts`, f32 [N, 2]; `scores` are f32 [N, K]."""
    return scores.where(_find_kept(scores.exp(), cuts) | is_greedy(sampling_params)[:, None], float("-inf"))


def _find_kept(weights: Tensor, cuts: Tensor) -> Tensor:
    """Tells which candidates min_p, and typical_p behind it, leave, bool [N, K].

    `weights` are unnormalized, f32 [N, K]. `processors` has the host's forms of both, for one row.
    """
    min_p, typical_p = cuts[:, :1], cuts[:, 1:2]
    is_likely = weights >= min_p * weights.amax(dim=-1, keepdim=True)
    is_typical = _find_typical(weights.where(is_likely, 0.0), typical_p)
    return is_likely & is_typical


def _find_typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Tells which candidates are in the most typical set that reaches a probability, ties included; all from 1 on."""
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    information = -probabilities.log()
    expected = torch.where(probabilities > 0, probabilities * information, 0.0).sum(dim=-1, keepdim=True)
    distance = (information - expected).abs()
    if not has_wide_integers(weights.device) and weights.shape[-1] <= MAX_CANDIDATES:
        # Compilers for other devices may take no sort.
        is_closer = distance[:, None, :] < distance[:, :, None]
        is_kept = torch.where(is_closer, probabilities[:, None, :], 0.0).sum(dim=-1) < typical_p
    else:
        ordered, order = distance.sort(dim=-1)
        is_short = probabilities.gather(-1, order).cumsum(dim=-1) < typical_p
        last = is_short.sum(dim=-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
        is_kept = distance <= ordered.gather(-1, last)
    return is_kept | (typical_p >= 1)


def draw(ids: Tensor, scores: Tensor, sampling_params: Tensor, chance: Tensor) -> Tensor:
    """Draws one candidate of each row, int32 [N]: the one whose score plus noise is the largest, of several the lowest
    id. Greedy rows have no noise.

    `ids` are int32 [N, K] or [K]; `scores` f32 [N, K]; the rest is as in `sample`. With `rand` in place of keys, which
    must have the likeliest token first, it is the draw of bundles of earlier releases.
    """
    if chance.is_floating_point():
        return _invert(ids, scores.exp(), sampling_params, chance)
    greedy_rows = is_greedy(sampling_params)[:, None]
    return pick_largest(ids, scores + torch.where(greedy_rows, 0.0, make_noise(ids, chance)))


def pick_largest(ids: Tensor, values: Tensor) -> Tensor:
    """The id with the largest value in each row, of several the lowest: ids int32 [N, K] or [K], values f32 [N, K]."""
    is_largest = values == values.amax(dim=-1, keepdim=True)
    return torch.where(is_largest, ids, torch.iinfo(torch.int32).max).amin(dim=-1)


def _invert(ids: Tensor, weights: Tensor, sampling_params: Tensor, rand: Tensor) -> Tensor:
    """Draws by the inverse of the cumulative distribution; `weights` are unnormalized, f32 [N, K]."""
    cumulative = weights.cumsum(dim=-1)
    # Picks the first candidate whose cumulative weight exceeds the target; rounding must not lead past the last one.
    index = count_chosen(cumulative <= rand * cumulative[:, -1:])
    index = index.minimum(count_chosen(weights > 0) - 1)
    drawn = ids.gather(-1, index)[:, 0]
    return torch.where(is_greedy(sampling_params), ids[:, 0], drawn)


def is_greedy(sampling_params: Tensor) -> Tensor:
    """Tells which rows take the likeliest token, bool [N]; the argument is as in `sample`."""
    return (sampling_params[:, 0] == 1) | (sampling_params[:, 2] == 0)


def score(logits: Tensor, largest: Tensor, sampling_params: Tensor) -> Tensor:
    """Scores of logits f32 [N, M]; `largest`, f32 [N, 1], is the row's largest logit."""
    temperature = sampling_params[:, 2:3]
    return (logits - largest) / torch.where(temperature == 0, 1.0, temperature)


def pick_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes natural log probabilities of the picked and of the likeliest tokens.

    Args:
        logits: […, V], before temperature, top_k and top_p.
        tokens: Picked token ids, int32 […]; what comes out is open where they are INVALID_ROW or NO_TOKEN.

    Returns:
        Log probabilities of the picked tokens f32 […]; ids of the likeliest tokens int64 […, num_top], likeliest first;
        their log probabilities f32 […, num_top].
    """
    logprobs = logits.float().log_softmax(dim=-1)
    picked = logprobs.gather(-1, tokens.long().clamp(min=0)[..., None])[..., 0]
    top = logprobs.topk(num_top, dim=-1)
    return picked, top.indices, top.values
