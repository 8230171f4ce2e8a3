"""Picks tokens on the host, of logits that processors may have changed, as executables do.

The engine makes numbers of what a request asks for, and of the tokens that it has; `runtime_svc.engine.scheduler` has
the rules. Results are new tensors. What is excluded gets negative infinity.

To order a vocabulary takes longer than all else. Rows with a limit of candidates order the peaks of blocks, and then
the tokens of the highest blocks. Rows without one draw first, then ask whether top_p or typical_p leaves that token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from execution.candidates import sum_exactly, take_top
from execution.noise import make_host_noise
from execution.sampling import cut, draw, is_greedy, is_valid, mark_invalid, score, score_top, sum_weights
from execution.step import ProcessedRow

_EXCLUDED: Final = float("-inf")
_NO_CUTS: Final = (0.0, 1.0)
#: What each byte of a mask adds to the logits of eight tokens, f32 [256, 8].
_ADDED: Final = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 0, _EXCLUDED, 0.0)
#: Tokens of a block.
_BLOCK: Final = 32
#: Rows of up to so many candidates are drawn together.
_FEW: Final = 1 << 11
#: Of others, noise is computed for so many at a time: its two hundred operations take twice as long outside the cache.
_PART: Final = 1 << 15
#: Noise spans less than 26: a token with less than this share of the largest weight is never drawn.
_LEAST: Final = math.exp(-26)
#: More than rounding changes of information, and of a sum of weights as a share of it.
_DOUBT: Final = 1e-4


class _Rows(NamedTuple):
    """Rows to draw, as in `sample`; their logits end in excluded tokens that fill the last block.

    `cuts` are None if no row of the step has any.
    """

    logits: Tensor
    sampling_params: Tensor
    chance: Tensor
    cuts: Tensor | None
    vocab_size: int

    def choose(self, rows: list[int]) -> _Rows:
        """Some of them, in ascending order."""
        if len(rows) == len(self.logits):
            return self
        cuts = None if self.cuts is None else self.cuts[rows]
        return _Rows(self.logits[rows], self.sampling_params[rows], self.chance[rows], cuts, self.vocab_size)


def sample_on_host(
    logits: Tensor, sampling_params: Tensor, chance: Tensor, rows: Sequence[ProcessedRow], global_topk: int
) -> Tensor:
    """Picks a token for each row as `sampling.sample` does, and for `rows` as they ask.

    Arguments and result are as in `sample`; `logits`, f32 [N, V], stay as they are.
    """
    num_rows, vocab_size = logits.shape
    if rows or vocab_size % _BLOCK:
        logits = pad(logits, (0, -vocab_size % _BLOCK), value=_EXCLUDED)
    for row in rows:
        own = logits[row.row, :vocab_size]
        own.copy_(process(own, row))
    blocks = logits.view(num_rows, logits.shape[1] // _BLOCK, _BLOCK)
    peaks = blocks.amax(dim=-1)
    valid, highest = is_valid(peaks), peaks.argmax(dim=-1)
    tokens = (highest * _BLOCK + blocks[torch.arange(num_rows), highest].argmax(dim=-1)).to(torch.int32)
    drawn = (valid[:, 0] & ~is_greedy(sampling_params)).nonzero()[:, 0].tolist()
    if drawn:
        cut_rows = {row.row: row.cuts for row in rows if row.cuts != _NO_CUTS}
        cuts = torch.tensor([cut_rows.get(row, _NO_CUTS) for row in range(num_rows)]) if cut_rows else None
        every = _Rows(logits, sampling_params, chance, cuts, vocab_size)
        found = list(_find_candidates(every, peaks, drawn, global_topk))
        width = max(ids.shape[1] for _, ids, _ in found)
        ids = torch.cat([pad(ids, (0, width - ids.shape[1])) for _, ids, _ in found])
        scores = torch.cat([pad(scores, (0, width - scores.shape[1]), value=_EXCLUDED) for *_, scores in found])
        order = [row for rows_of_one, *_ in found for row in rows_of_one]
        if chance.is_floating_point():
            tokens[order] = draw(ids, scores, sampling_params[order], chance[order])
        else:
            tokens[order] = _draw(ids, scores, chance[order])
    return mark_invalid(tokens, valid)


def _find_candidates(
    every: _Rows, peaks: Tensor, drawn: Sequence[int], global_topk: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Finds what rows can draw: rows with equally many candidates, ids int32 [N, K], and scores f32 [N, K].

    An inverse distribution function takes the vocabulary in order; noise takes as many as can be drawn.
    """
    has_noise = not every.chance.is_floating_point()
    limits: dict[int, list[int]] = {}
    for row, top_k in zip(drawn, every.sampling_params[drawn, 0].tolist(), strict=True):
        limit = min((int(one) for one in (top_k, global_topk) if one > 0), default=0)
        limits.setdefault(min(limit or (0 if has_noise else every.vocab_size), every.vocab_size), []).append(row)
    for limit, own in limits.items():
        for rows in [own] if limit else [[row] for row in own]:
            chosen = every.choose(rows)
            ids, scores = _take_limited(chosen, peaks[rows], limit) if limit else _take_unlimited(chosen)
            if ids.shape[1] > _FEW and has_noise:
                each = zip(*(torch.split(one, 1) for one in (ids, scores, chosen.chance)), strict=True)
                ids = torch.cat([_draw(*one) for one in each])[:, None]
                scores = torch.zeros(ids.shape)
            yield rows, ids, scores


def _take_limited(rows: _Rows, peaks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The candidates of rows with a limit, likeliest first.

    The likeliest tokens are in the blocks with the highest peaks, of equal ones in the first: each of these has one.
    """
    if count * _BLOCK < rows.logits.shape[-1]:
        blocks = take_top(peaks, count)[1]
        ids = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, dtype=torch.int32)).flatten(1)
        top_logits, ids = take_top(rows.logits.gather(-1, ids.long()), count, ids)
    else:
        top_logits, ids = take_top(rows.logits, count)
    params, sums = rows.sampling_params, None
    # Without a top_k of its own, a row's top_p is of the whole vocabulary.
    if ((params[:, 0] <= 0) & (params[:, 1] < 1)).any():
        # One row after the other: together they leave the processor's cache, and take three times as long.
        each = [slice(row, row + 1) for row in range(len(params))]
        sums = torch.cat([sum_weights(rows.logits[i], top_logits[i, :1], params[i], rows.vocab_size) for i in each])
    return ids, _score(rows, top_logits, sums)


def _score(rows: _Rows, top_logits: Tensor, sums: Tensor | None) -> Tensor:
    scores = score_top(top_logits, sums, rows.sampling_params, rows.vocab_size)
    return scores if rows.cuts is None else cut(scores, rows.cuts, rows.sampling_params)


def _take_unlimited(row: _Rows) -> tuple[Tensor, Tensor]:
    """The candidates of one row without a limit; of many, the drawn one alone."""
    top_p = float(row.sampling_params[0, 1])
    min_p, typical_p = _NO_CUTS if row.cuts is None else row.cuts[0].tolist()
    scores = score(row.logits, row.logits.amax(dim=-1, keepdim=True), row.sampling_params)
    weights = scores.exp()
    total = float(weights.sum())
    # Less likely tokens have less than 1 - top_p together.
    least = max(_LEAST, min_p, (1 - top_p - _DOUBT) * total / row.vocab_size)
    ids = torch.arange(weights.shape[1], dtype=torch.int32).masked_select(weights[0] >= least)
    own_scores = scores.index_select(1, ids)
    if top_p >= 1 and typical_p >= 1:
        return ids[None], own_scores
    if len(ids) > _FEW and (top_p >= 1 or typical_p >= 1):
        own, values = weights[0].index_select(0, ids), _add_noise(ids, own_scores, row.chance)[0]
        if top_p < 1:
            place = _draw_first(values, -own_scores[0], own, top_p * total, 0.0)
        else:
            place = _draw_first(values, _find_distance(own), own, typical_p * float(own.sum()), _DOUBT)
        if place is not None:
            return ids[place].view(1, 1), torch.zeros(1, 1)
    top_logits, top_ids = take_top(row.logits.index_select(1, ids), len(ids), ids[None])
    top_scores = _score(row, top_logits, sum_exactly(weights, row.vocab_size) if top_p < 1 else None)
    is_left = top_scores[0] > _EXCLUDED
    return top_ids[:, is_left], top_scores[:, is_left]


def _draw_first(values: Tensor, distance: Tensor, weights: Tensor, mass: float, doubt: float) -> Tensor | None:
    """Draws the place of a token that is left where tokens fill `mass` in the order of their distance.

    Returns None if rounding may decide: of weights, f32 [K], or by `doubt` of distances. `values` are scores and noise.
    """
    while True:
        place = values.argmax()
        own = distance[place]
        if (weights * (distance <= own + doubt)).sum() - weights[place] < (1 - _DOUBT) * mass:
            return place
        if (weights * (distance < own - doubt)).sum() <= (1 + _DOUBT) * mass:
            return None
        values = values.where(distance < own, _EXCLUDED)


def _find_distance(weights: Tensor) -> Tensor:
    """How far the information of tokens is from the expected one, as in `sampling`; `weights` are f32 [K], none 0."""
    probabilities = weights / weights.sum()
    information = -probabilities.log()
    return (information - (probabilities * information).sum()).abs()


def _draw(ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    """As `sampling.draw`, for rows that are not greedy."""
    if ids.shape[1] == 1:
        return ids[:, 0]
    values = _add_noise(ids, scores, keys)
    is_largest = values == values.amax(dim=-1, keepdim=True)
    return torch.where(is_largest, ids, torch.iinfo(torch.int32).max).amin(dim=-1)


def _add_noise(ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    return scores + torch.cat([make_host_noise(part, keys) for part in torch.split(ids, _PART, dim=-1)], dim=-1)


def process(logits: Tensor, row: ProcessedRow) -> Tensor:
    """Changes the logits of a row, f32 [V], as `logit_changes.change_logits` does, bit by bit."""
    if row.pairs:
        ids = _read(row.pairs["pair_ids"], torch.int32).long()
        bias, factor, penalty = (_read(row.pairs[f"pair_{name}"]) for name in ("bias", "factor", "penalty"))
        own = logits[ids] + bias
        own = torch.where(own < 0, own * factor, own / factor) + penalty
        logits = logits.index_put((ids,), own)
    if row.mask is None:
        return logits
    # A sum: what is no number stays so.
    return logits + _ADDED.index_select(0, _read(row.mask, torch.uint8).int()).view(-1)[: len(logits)]


def _read(values: bytes, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype)
