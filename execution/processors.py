"""Picks tokens on the host, of logits that processors may have changed: as executables do, for one row after the other.

The engine makes numbers of what a request asks for, and of the tokens that it has; `runtime_svc.engine.scheduler` has
the rules. Logits are f32 [V]; results are new tensors. What is excluded gets negative infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bundle.abi.inputs import WORD_BITS
from execution.candidates import find_likeliest, take_top
from execution.sampling import count_candidates, draw, is_greedy, is_valid, mark_invalid, score, score_top, sum_weights
from execution.step import ProcessedRow

_EXCLUDED: Final = float("-inf")
#: Rows of up to so many candidates are drawn together.
_FEW: Final = 1 << 11
#: So many blocks of a vocabulary for each candidate: of those that reach the bound, few are no candidates.
_BLOCKS: Final = 8
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
    min_p, typical_p = (0.0, 1.0) if asked is None else asked.cuts
    is_cut = min_p > 0 or typical_p < 1
    if not (global_topk or top_k > 0 or top_p < 1 or is_cut) and chance == torch.int32:
        scores = score(logits, logits.amax(dim=-1, keepdim=True), sampling_params)
        return torch.arange(logits.shape[-1], dtype=torch.int32), scores[0]
    vocab_size = logits.shape[-1]
    limit = min((int(one) for one in (top_k, global_topk) if one > 0), default=0)
    top_logits, ids = _take_top(logits[0], count_candidates(limit, vocab_size))
    # Without a top_k of its own, a row's top_p is of the whole vocabulary.
    is_of_all = top_k <= 0 and top_p < 1
    sums = sum_weights(logits, top_logits[None, :1], sampling_params, vocab_size) if is_of_all else None
    scores = score_top(top_logits[None], sums, sampling_params, vocab_size)[0]
    if is_cut:
        scores = cut(scores, min_p, typical_p)
    is_left = scores > _EXCLUDED
    return ids[is_left], scores[is_left]


def _take_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Takes what `candidates.take_top` takes of a row, logits f32 [V], without what is excluded.

    At least `count` logits reach the `count`-th largest of the largest ones of blocks. It sorts these alone.
    """
    size = len(logits) // (_BLOCKS * count)
    bound = _EXCLUDED
    if size > 1:
        blocks = logits[: len(logits) // size * size].view(-1, size)
        bound = blocks.amax(dim=-1).topk(count).values[-1].item()
    ids = ((logits >= bound) & (logits > _EXCLUDED)).nonzero()[:, 0]
    top, places = take_top(logits[None, ids], min(count, len(ids)))
    return top[0], ids[places[0]].to(torch.int32)


def process(logits: Tensor, row: ProcessedRow) -> Tensor:
    """Changes the logits of a row as `logit_changes.change_logits` does, bit by bit."""
    if row.pairs:
        ids = _read(row.pairs["pair_ids"], torch.int32).long()
        bias, factor, penalty = (_read(row.pairs[f"pair_{name}"]) for name in ("bias", "factor", "penalty"))
        own = logits[ids] + bias
        own = torch.where(own < 0, own * factor, own / factor) + penalty
        logits = logits.index_put((ids,), own)
    if row.mask is None:
        return logits
    bits = (_read(row.mask, torch.int32)[:, None] >> torch.arange(WORD_BITS, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.view(-1)[: len(logits)] == 0, _EXCLUDED)


def cut(scores: Tensor, min_p: float, typical_p: float) -> Tensor:
    """Excludes candidates of one row behind top_k and top_p; `scores`, f32 [K], are as in `sampling`."""
    weights = scores.exp()
    if min_p > 0:
        weights = cut_below(weights, min_p)
    if typical_p < 1:
        weights = cut_untypical(weights, typical_p)
    return scores.where(weights > 0, _EXCLUDED)


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


def _read(values: bytes, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype)
