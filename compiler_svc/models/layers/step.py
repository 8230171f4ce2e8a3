"""What all layers know of a step: where its tokens are, in their sequences and in the KV cache, and their adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What is the same in all steps of an executable.

    If it `reads_cache`, rows continue sequences in the KV cache; otherwise each row begins one. `max_context` is
    positions that a row may have: targets that cannot stop at a row's last one read as many. The KV cache has a scratch
    slot behind the others, unless slots have `spare_positions`.
    """

    reads_cache: bool
    max_context: int
    padding_side: Literal["right", "left"] = "right"
    spare_positions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of one step, as `kiln::attend` and `kiln::adapt` take them.

    Attributes:
        positions: int32 [rows, tokens]: place in the sequence, which is the place in the cache; -1 for padding and in
            idle rows, where there is no token.
        block_table: int32 [rows, blocks of a row]: the blocks that hold the row's sequence; of slots, the row's slot.
        last: int32 [rows]: the row's last token; None if rows have one token.
        prompt_lens: int32 [rows]: tokens of the row's prompt; None if it is not known.
        adapter_ids: int32 [rows]: slot of the row's LoRA adapter; -1: it has none. None if no layer has room for any.
    """

    kind: StepKind
    positions: Tensor
    block_table: Tensor
    last: Tensor | None
    prompt_lens: Tensor | None = None
    adapter_ids: Tensor | None = None

    @classmethod
    def of_inputs(
        cls,
        kind: StepKind,
        cache: Tensor,
        position_ids: Tensor,
        *,
        seq_ids: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        active_block_table: Tensor | None = None,
        num_tokens: Tensor | None = None,
        computed_context_lens: Tensor | None = None,
        prompt_lens: Tensor | None = None,
        live_rows: Tensor | None = None,
        adapter_ids: Tensor | None = None,
    ) -> StepTokens:
        """Finds the tokens in an executable's inputs (`bundle.abi.inputs`). `cache` is any tensor of the KV cache."""
        rows, width = position_ids.shape
        columns = torch.arange(width, dtype=torch.int32, device=position_ids.device)
        num_blocks, block_tokens = cache.shape[0], cache.shape[2]
        if active_block_table is None:
            assert seq_ids is not None, "an executable without blocks has slots"
            block_table = seq_ids[:, None]
            if kind.spare_positions:
                is_token = block_table < num_blocks
                block_table = block_table.clamp(max=num_blocks - 1)
            else:
                is_token = block_table < num_blocks - 1
        else:
            assert slot_mapping is not None, "an executable with blocks says where tokens are written"
            block_table = active_block_table
            is_token = slot_mapping < (num_blocks - 1) * block_tokens
        last = None
        if num_tokens is not None:
            if kind.padding_side == "right":
                last = (num_tokens - 1).clamp(min=0)
                is_token = is_token & (columns < num_tokens[:, None])
            else:
                last = torch.full_like(num_tokens, width - 1)
                is_token = is_token & (columns >= width - num_tokens[:, None])
        if computed_context_lens is not None:
            is_token = is_token & (position_ids >= computed_context_lens[:, None])
        if live_rows is not None:
            numbers = torch.arange(rows, dtype=torch.int32, device=position_ids.device)
            is_token = is_token & (numbers < live_rows)[:, None]
        positions = torch.where(is_token, position_ids, -1)
        return cls(
            kind=kind,
            positions=positions,
            block_table=block_table,
            last=last,
            prompt_lens=prompt_lens,
            adapter_ids=adapter_ids,
        )

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row's sequence when the keys of a token are computed; int32 [rows, tokens], or [rows, 1].

        A prompt has all of its tokens, though steps compute parts of it, and a generated token has all before it. If
        prompts are not known, it is the sequence so far, with the tokens of this step; 0 in idle rows.
        """
        if self.prompt_lens is None:
            return (self.positions.amax(dim=1) + 1)[:, None]
        return torch.maximum(self.positions + 1, self.prompt_lens[:, None])

    def take_last(self, hidden: Tensor) -> Tensor:
        """What belongs to each row's last token: of [rows, tokens, …], [rows, …]."""
        if self.last is None:
            return hidden.squeeze(1)
        return hidden[torch.arange(hidden.shape[0], dtype=torch.int32, device=hidden.device), self.last]
