"""Picking tokens from logits, with the semantics of Hugging Face's `generate`.

Plain tensor arithmetic without data-dependent shapes, so that it can be exported into an executable as well as run
after one. Rows do not see each other: a row's token depends on its own logits, parameters and random number.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id where several are: logits [N, V] to int32 [N]."""
    return logits.argmax(dim=-1).to(torch.int32)


def sample(logits: Tensor, sampling_params: Tensor, rand: Tensor, global_topk: int) -> Tensor:
    """Draws one token a row: temperature, then top_k, then top_p, then the inverse of the cumulative distribution.

    Args:
        logits: [N, V].
        sampling_params: f32 [N, 3]: top_k, top_p, temperature. top_k 0 sets no limit of its own. Temperature 0 or
            top_k 1 is greedy.
        rand: f32 [N, 1], uniform in [0, 1).
        global_topk: Only this many of the likeliest tokens are candidates; 0: all are.

    Returns:
        int32 [N].
    """
    ids, weights = candidates(logits, sampling_params, global_topk)
    cumulative = weights.cumsum(dim=-1)
    # The first candidate whose cumulative weight exceeds the target; rounding must not lead past the last one.
    index = (cumulative <= rand * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    index = index.minimum((weights > 0).sum(dim=-1, keepdim=True) - 1)
    drawn = ids.gather(-1, index)[:, 0].to(torch.int32)
    is_greedy = (sampling_params[:, 0] == 1) | (sampling_params[:, 2] == 0)
    return torch.where(is_greedy, greedy(logits), drawn)


def candidates(logits: Tensor, sampling_params: Tensor, global_topk: int) -> tuple[Tensor, Tensor]:
    """The tokens that can be drawn, likeliest first, and their weights; arguments as in `sample`.

    top_p keeps the likeliest tokens until their probabilities reach it, the one that crosses it included. Probability
    is measured among the row's top_k tokens or, where top_k is 0, among the whole vocabulary.

    Returns:
        Token ids int64 [N, K] and unnormalized weights f32 [N, K], 0 where a token cannot be drawn.
    """
    top_k, top_p, temperature = sampling_params.unbind(dim=-1)
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    logits = logits.float()
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / divisor
    vocab_size = logits.shape[-1]
    num_candidates = min(global_topk, vocab_size) if global_topk > 0 else vocab_size
    top_scores, ids = scores.topk(num_candidates, dim=-1)
    weights = top_scores.exp()
    rank = torch.arange(num_candidates, device=logits.device)[None, :]
    has_top_k = (top_k > 0)[:, None]
    weights = weights.where(~has_top_k | (rank < top_k[:, None]), 0.0)
    total = torch.where(has_top_k, weights.sum(dim=-1, keepdim=True), scores.exp().sum(dim=-1, keepdim=True))
    before = weights.cumsum(dim=-1) - weights
    is_kept = (before < top_p[:, None] * total) | (top_p >= 1)[:, None] | (rank == 0)
    return ids, weights.where(is_kept, 0.0)
