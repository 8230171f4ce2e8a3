"""The state of executables: the tensors of the KV cache, one of each kind per layer."""

from __future__ import annotations

from typing import Final

import msgspec

from bundle.abi.tensor import DType

#: Kinds of tensors that every layer has, in calling order.
KINDS: Final = ("k_cache", "v_cache")

#: Meaning of each axis of a tensor.
AXES: Final = ("slot", "kv_head", "position", "head_dim")
#: The same in a cache made of blocks.
BLOCK_AXES: Final = ("block", "kv_head", "position", "head_dim")


class StateTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of the KV cache of a rank."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    #: Meaning of each axis: `AXES`, or `BLOCK_AXES` in a cache made of blocks.
    axes: tuple[str, ...]
    #: Above 0: the positions of a slot are a ring, which keeps the latest; a token sees this many, its own included.
    window: int = 0

    @property
    def num_positions(self) -> int:
        """Positions of a slot or a block."""
        return self.shape[self.axes.index("position")]


class StateLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV cache of every rank, made of slots or of blocks.

    Entries 0 to `num_rows - 1` of each tensor's first axis are slots, or blocks, that requests hold. Padding and idle
    rows change nothing, but some graphs write there, too: a scratch slot, or block, comes last for them, unless each
    slot has a spare position behind those of sequences.
    """

    tensors: tuple[StateTensor, ...]
    #: Slots; in a cache made of blocks, the most sequences that may run at once.
    num_slots: int
    #: For each rank, the checkpoint's KV heads that it holds, in order; -1 is a padding head of zeros.
    kv_heads_by_rank: tuple[tuple[int, ...], ...]
    #: Blocks without the scratch block; 0: the cache is made of slots.
    num_blocks: int = 0
    #: Positions of a block, in tokens; 0: the cache is made of slots.
    block_tokens: int = 0
    #: Whether slots have a spare position, the last one, and there is no scratch slot.
    has_spare_positions: bool = False

    @property
    def num_rows(self) -> int:
        """Slots or blocks that requests can hold."""
        return self.num_blocks or self.num_slots

    @property
    def num_entries(self) -> int:
        """Size of the first axis of each tensor."""
        return self.num_rows + (0 if self.has_spare_positions else 1)

    @property
    def max_rewound_tokens(self) -> int | None:
        """How many of its latest tokens a sequence may give up and go on with others; None: any number.

        Of a longer past, rings lack what the next token sees. Every token that was written counts, also one whose step
        was called ahead and whose output was dropped.
        """
        rings = (tensor for tensor in self.tensors if tensor.window)
        return min((ring.num_positions - ring.window + 1 for ring in rings), default=None)
