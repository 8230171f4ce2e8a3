"""Log probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from torch import Tensor


def pick_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log probabilities of the picked and of the likeliest tokens.

    Args:
        logits: [N, V], before temperature, top_k and top_p.
        tokens: Picked token ids, int32 [N].
        num_top: How many of the likeliest to return, K.

    Returns:
        Of the picked f32 [N]; ids of the likeliest int64 [N, K], likeliest first; theirs f32 [N, K].
    """
    logprobs = logits.float().log_softmax(dim=-1)
    picked = logprobs.gather(-1, tokens.long()[:, None])[:, 0]
    top = logprobs.topk(num_top, dim=-1)
    return picked, top.indices, top.values
