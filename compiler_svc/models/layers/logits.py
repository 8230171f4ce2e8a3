"""Logits whose vocabulary is divided among ranks: gathering them, and picking tokens without gathering them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiler_svc.models.layers.linear import cast
from compiler_svc.models.layers.ranks import Ranks
from execution.candidates import add_sums, carry_sums, find_likeliest, is_below_infinity, take_top
from execution.logit_changes import change_logits
from execution.sampling import (
    count_candidates,
    cut,
    draw,
    greedy,
    is_valid,
    mark_invalid,
    sample,
    score_top,
    sum_weights,
)


@dataclass(frozen=True, slots=True)
class RankLogits:
    """One rank's part of logits. What it computes is equal on all ranks, and what one rank alone would compute.

    Attributes:
        part: [rows, share] of the vocabulary, in the dtype of the computation; the last shares end in padding where the
            vocabulary does not divide evenly.
        rank: int32 [1], which part it is; None at one rank.
    """

    part: Tensor
    rank: Tensor | None
    vocab_size: int
    ranks: Ranks

    def gather(self) -> Tensor:
        """The whole logits, f32 [rows, vocab_size]."""
        whole = self.ranks.all_gather(self.part)
        if whole.shape[-1] != self.vocab_size:
            whole = whole[:, : self.vocab_size]
        return cast(whole, torch.float32)

    def change(self, changes: Mapping[str, Tensor]) -> RankLogits:
        """Changes logits by inputs of processors, as `change_logits`; they become float32."""
        first_id = None if self.rank is None else self._first_id()
        part = change_logits(cast(self.part, torch.float32), changes, self.vocab_size, first_id)
        return replace(self, part=part)

    def greedy(self) -> Tensor:
        """The likeliest token of each row, the lowest id where several are: int32 [rows], as `sampling.greedy`."""
        if self.rank is None:
            return greedy(self.gather())
        wide = self._wide_part()
        # Not those at the places: what `argmax` makes of NaN is no index on every device.
        largest, ids = self._join(wide.amax(dim=-1, keepdim=True), find_likeliest(wide)[:, None])
        valid = is_valid(largest)
        # Of equals the first is the lowest rank's, whose ids are the lowest.
        rank = find_likeliest(torch.where(valid, largest, 0.0))[:, None]
        return mark_invalid(ids.gather(-1, rank)[:, 0], valid)

    def sample(
        self,
        sampling_params: Tensor,
        chance: Tensor,
        global_topk: int,
        *,
        needs_total: bool,
        cuts: Tensor | None = None,
    ) -> Tensor:
        """Draws one token a row, int32 [rows]; INVALID_ROW where the logits are no numbers.

        Other arguments are as in `execution.sampling.sample`; `needs_total` says that rows may have top_k 0, whose
        probabilities are of the whole vocabulary.
        """
        if self.rank is None or global_topk == 0:
            return sample(self.gather(), sampling_params, chance, global_topk, cuts)
        top_logits, ids, valid = self._take_top(count_candidates(global_topk, self.vocab_size))
        sums = self._sum_weights(top_logits[:, :1], sampling_params, valid) if needs_total else None
        scores = score_top(top_logits, sums, sampling_params, self.vocab_size)
        if cuts is not None:
            scores = cut(scores, cuts, sampling_params)
        return mark_invalid(draw(ids, scores, sampling_params, chance), valid)

    def tell_likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of each row, likeliest first: natural log probabilities f32 [rows, count] and ids int32
        [rows, count]. Rows whose logits are no numbers have any.
        """
        if self.rank is None:
            logits, ids = take_top(self._wide_part(), count)
        else:
            logits, ids, _ = self._take_top(count)
        return logits - self._log_sums(), ids

    def tell(self, ids: Tensor) -> Tensor:
        """The natural log probability of one token of each row, f32 [rows]; ids int32 [rows]."""
        wide, places = self._wide_part(), ids[:, None]
        if self.rank is not None:
            places = places - self._first_id()
        is_own = (places >= 0) & (places < wide.shape[-1])
        own = wide.gather(-1, torch.where(is_own, places, 0))
        logits = self.ranks.find_largest(torch.where(is_own, own, float("-inf")))
        return (logits - self._log_sums())[:, 0]

    def _log_sums(self) -> Tensor:
        """What log probabilities are less than logits by, f32 [rows, 1]."""
        wide = self._wide_part()
        largest = self.ranks.find_largest(wide.amax(dim=-1, keepdim=True))
        parts = (wide - largest).exp().sum(dim=-1, keepdim=True)
        return largest + self.ranks.all_gather(parts).sum(dim=-1, keepdim=True).log()

    def _take_top(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of the whole vocabulary: logits f32 [rows, count], zeros in invalid rows, and ids int32
        [rows, count]; then which rows have numbers, bool [rows, 1]. Each rank contributes as many as may be needed.
        """
        wide = self._wide_part()
        logits, places = take_top(wide, min(count, wide.shape[-1]))
        # NaN may stand behind the top. A part may be padding alone, which is less likely than any number.
        logits = torch.where(is_below_infinity(wide.amax(dim=-1, keepdim=True)), logits, float("nan"))
        logits, ids = self._join(logits, places)
        valid = is_valid(logits)
        logits, ids = take_top(torch.where(valid, logits, 0.0), count, ids)
        return logits, ids, valid

    def _join(self, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of all ranks side by side in rank order: logits f32 and ids int32, [rows, tp_degree * K] each.

        Takes this rank's logits, f32 [rows, K], and their places in its part, int32 [rows, K].
        """
        # One collective could carry the logits' bits as integers, but XLA does not lower such a view.
        return self.ranks.all_gather(logits), self.ranks.all_gather(places + self._first_id())

    def _sum_weights(self, largest: Tensor, sampling_params: Tensor, valid: Tensor) -> Tensor:
        part = sum_weights(torch.where(valid, self._wide_part(), 0.0), largest, sampling_params, self.vocab_size)
        return add_sums(self.ranks.all_gather(carry_sums(part)), self.ranks.tp_degree)

    def _wide_part(self) -> Tensor:
        """The part in float32, padding less likely than any token."""
        wide, share = cast(self.part, torch.float32), self.part.shape[-1]
        if share * self.ranks.tp_degree == self.vocab_size:
            return wide
        if self.rank is None:
            return wide[:, : self.vocab_size]
        ids = torch.arange(share, dtype=torch.int32, device=wide.device) + self._first_id()
        return torch.where(ids < self.vocab_size, wide, float("-inf"))

    def _first_id(self) -> Tensor:
        """Id of the part's first token, int32 [1]."""
        assert self.rank is not None, "one rank alone has no use for it"
        return self.rank * self.part.shape[-1]
