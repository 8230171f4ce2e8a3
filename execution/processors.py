"""Picks tokens on the host, of logits that processors may have changed, as executables do.

The engine makes numbers of what a request asks for, and of the tokens that it has; `runtime_svc.engine.scheduler` has
the rules. Results are new tensors. What is excluded gets negative infinity.

Rows with a limit of candidates take their likeliest tokens. Rows without one draw first, then ask whether top_p or
typical_p leaves that token: to order a vocabulary takes longer than all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from execution import host_rows
from execution.candidates import round_sum, sum_exactly
from execution.host_rows import RowToDraw, change_row, find_top, keep_nucleus, make_noise
from execution.sampling import cut, draw, mark_invalid, pick_largest, score, sum_weights
from execution.step import ProcessedRow

_EXCLUDED: Final = float("-inf")
_NO_CUTS: Final = (0.0, 1.0)
#: Rows of up to so many candidates are drawn together.
_FEW: Final = 1 << 11
#: Of others, noise is computed for so many at a time: outside the processor's cache it takes twice as long.
_PART: Final = 1 << 15
#: Noise spans less than 26: a token with less than this share of the largest weight is never drawn.
_LEAST: Final = math.exp(-26)
#: More than rounding changes of information, and of a sum of weights as a share of it.
_DOUBT: Final = 1e-4


class _Rows(NamedTuple):
    """Rows to draw, as in `sample`. `logits`, f32 [M, V], are of all rows; `rows` are some of them.

    `cuts` are None if no row of the step has any.
    """

    logits: Tensor
    rows: list[RowToDraw]
    sampling_params: Tensor
    chance: Tensor
    cuts: Tensor | None

    @property
    def vocab_size(self) -> int:
        """How many logits a row has."""
        return self.logits.shape[1]

    def choose(self, rows: list[int]) -> _Rows:
        """Some of them, in ascending order."""
        if len(rows) == len(self.rows):
            return self
        cuts = None if self.cuts is None else self.cuts[rows]
        own = [self.rows[row] for row in rows]
        return _Rows(self.logits, own, self.sampling_params[rows], self.chance[rows], cuts)

    def change(self) -> Iterator[Tensor]:
        """Yields the changed logits of each, f32 [1, V]."""
        for row in self.rows:
            yield change_row(self.logits[row.place], row.processed)[None]


class _Found(NamedTuple):
    """What rows can draw: ids int32 [N, K], scores f32 [N, K], and which rows' logits are numbers, bool [N, 1]."""

    rows: list[int]
    ids: Tensor
    scores: Tensor
    valid: Tensor


def sample_on_host(
    logits: Tensor, sampling_params: Tensor, chance: Tensor, rows: Sequence[ProcessedRow], global_topk: int
) -> Tensor:
    """Picks a token for each row as `sampling.sample` does, and for `rows` as they ask.

    Arguments and result are as in `sample`; `logits`, f32 [N, V], stay as they are.
    """
    changes = {row.row: row for row in rows}
    cut_rows = {row.row: row.cuts for row in rows if row.cuts != _NO_CUTS}
    every = _Rows(
        logits,
        [RowToDraw(row, changes.get(row), own) for row, own in enumerate(sampling_params.tolist())],
        sampling_params,
        chance,
        torch.tensor([cut_rows.get(row, _NO_CUTS) for row in range(len(logits))]) if cut_rows else None,
    )
    found = list(_find_candidates(every, global_topk))
    order = [row for one in found for row in one.rows]
    ids, scores, valid = found[0][1:] if len(found) == 1 else _join(found)
    if chance.is_floating_point():
        drawn = draw(ids, scores, sampling_params[order], chance[order])
    else:
        drawn = _draw(ids, scores, chance if len(found) == 1 else chance[order])
    drawn = mark_invalid(drawn, valid)
    if len(found) == 1:
        return drawn
    tokens = torch.empty(len(logits), dtype=torch.int32)
    tokens[order] = drawn
    return tokens


def _join(found: Sequence[_Found]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids, scores and validity of all rows; rows of fewer candidates are filled up with what cannot be drawn."""
    width = max(one.ids.shape[1] for one in found)
    ids = torch.cat([pad(one.ids, (0, width - one.ids.shape[1])) for one in found])
    scores = torch.cat([pad(one.scores, (0, width - one.ids.shape[1]), value=_EXCLUDED) for one in found])
    return ids, scores, torch.cat([one.valid for one in found])


def _find_candidates(every: _Rows, global_topk: int) -> Iterator[_Found]:
    """Finds what rows can draw, those with equally many candidates together.

    Greedy rows have one. An inverse distribution function takes the vocabulary in order; noise takes as many as can be
    drawn.
    """
    has_noise = not every.chance.is_floating_point()
    limits: dict[int, list[int]] = {}
    for place, row in enumerate(every.rows):
        top_k, _, temperature = row.sampling_params
        own_limits = (top_k if temperature else 1, global_topk)
        limit = min((int(one) for one in own_limits if one > 0), default=0 if has_noise else every.vocab_size)
        limits.setdefault(min(limit, every.vocab_size), []).append(place)
    for limit, own in limits.items():
        for rows in [own] if limit else [[row] for row in own]:
            chosen = every.choose(rows)
            scores, ids, valid = find_top(chosen.logits, chosen.rows, limit or 1)
            if limit > 1:
                scores = _exclude(chosen, scores, _sum_limited(chosen))
            elif not limit and valid:
                ids, scores = _take_unlimited(chosen)
            if ids.shape[1] > _FEW and has_noise:
                each = zip(*(torch.split(one, 1) for one in (ids, scores, chosen.chance)), strict=True)
                ids = torch.cat([_draw(*one) for one in each])[:, None]
                scores = torch.zeros(ids.shape)
            yield _Found(rows, ids, scores, valid)


def _sum_limited(rows: _Rows) -> Tensor | None:
    """The sums of weights that top_p is a share of where a row has no top_k of its own; None if no row needs one."""
    if all(top_k > 0 or top_p >= 1 for _, _, (top_k, top_p, _) in rows.rows):
        return None
    each = zip(rows.change(), torch.split(rows.sampling_params, 1), strict=True)
    sums = [sum_weights(row, row.amax(dim=-1, keepdim=True), own, rows.vocab_size) for row, own in each]
    return torch.cat(sums)


def _exclude(rows: _Rows, scores: Tensor, sums: Tensor | None) -> Tensor:
    """As `sampling.score_top` and `sampling.cut`, for scores of as many candidates as top_k leaves, or fewer."""
    top_k, top_p = rows.sampling_params[:, :1], rows.sampling_params[:, 1:2]
    if any(row.sampling_params[1] < 1 for row in rows.rows):
        weights = scores.exp()
        measure = weights.sum(dim=-1, keepdim=True)
        if sums is not None:
            measure = torch.where(top_k > 0, measure, round_sum(sums, rows.vocab_size))
        keep_nucleus(scores, weights, measure, top_p)
    return scores if rows.cuts is None else cut(scores, rows.cuts, rows.sampling_params)


def _take_unlimited(row: _Rows) -> tuple[Tensor, Tensor]:
    """The candidates of one row without a limit; of many, the drawn one alone."""
    top_p = row.rows[0].sampling_params[1]
    min_p, typical_p = _NO_CUTS if row.cuts is None else row.cuts[0].tolist()
    (logits,) = row.change()
    scores = score(logits, logits.amax(dim=-1, keepdim=True), row.sampling_params)
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
    alone = RowToDraw(0, None, row.rows[0].sampling_params)
    top_scores, places, _ = find_top(logits.index_select(1, ids), [alone], len(ids))
    top_scores = _exclude(row, top_scores, sum_exactly(weights, row.vocab_size) if top_p < 1 else None)
    is_left = top_scores[0] > _EXCLUDED
    return ids[places[:, is_left]], top_scores[:, is_left]


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
    if ids.shape[1] > _PART:
        return pick_largest(ids, _add_noise(ids, scores, keys))
    return host_rows.draw(ids, scores, keys)


def _add_noise(ids: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    return scores + torch.cat([make_noise(part, keys) for part in torch.split(ids, _PART, dim=-1)], dim=-1)
