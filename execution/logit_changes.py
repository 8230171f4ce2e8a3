"""What logit processors do to logits inside an executable: numbers for some tokens of a row, and a mask for all.

The engine makes the numbers and the mask of a request's parameters; `processors` does the same on the host, from the
parameters themselves. A row without either keeps its logits, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bundle.abi.inputs import WORD_BITS
from execution.candidates import index_dtype


def change_logits(logits: Tensor, changes: Mapping[str, Tensor], vocab_size: int, first_id: Tensor | None) -> Tensor:
    """Changes logits, f32 [N, M], by the ABI's inputs of processors.

    A token of `pair_ids` gets its bias added; is multiplied with its factor, or divided by it unless it is negative;
    and gets its penalty added, in this order. Then what `token_bitmask` lacks gets negative infinity. What is no number
    stays so, whether the mask has it or not.

    Args:
        changes: Inputs by name.
        vocab_size: Tokens of the whole vocabulary.
        first_id: Id of the first token, int32 [1], if the logits are a part of the vocabulary; other ids change
            nothing. The last part may end in padding.
    """
    count, index = logits.shape[-1], index_dtype(logits.device) or torch.int64
    places, ids = changes["pair_ids"], torch.arange(count, dtype=torch.int32, device=logits.device)
    if first_id is not None:
        places, ids = places - first_id, ids + first_id
    # Pairs that change nothing here share a column of their own.
    # Compared with tensors, here and below: torch-xla takes numbers as arguments of 64 bits.
    own_column = torch.full_like(places, count)
    places = torch.where((places >= 0) & (places < own_column), places, own_column).to(index)
    wide = torch.nn.functional.pad(logits, (0, 1))
    own = wide.gather(-1, places) + changes["pair_bias"]
    factor = changes["pair_factor"]
    own = torch.where(own < torch.zeros_like(own), own * factor, own / factor) + changes["pair_penalty"]
    wide = wide.scatter(-1, places, own)[:, :count]
    ids = ids.clamp(max=vocab_size - 1)
    words = changes["token_bitmask"].index_select(-1, (ids >> 5).to(index))
    # torch-xla divides to shift to the right, which rounds negative words up.
    bits = torch.ones_like(ids) << (ids & (WORD_BITS - 1))
    return wide + torch.where(words & bits == 0, float("-inf"), 0.0)
