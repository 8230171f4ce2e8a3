"""The state of one rank on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bundle.abi.state import StateLayout
from execution.errors import SlotUnknown
from execution.executors.memory import KERNELS_CHOICE, ZeroedTensors


class RankState(ZeroedTensors):
    """State tensors by name. Their first axis is the slot, or the block."""

    def __init__(self, layout: StateLayout, *, kernels_choice: Path = KERNELS_CHOICE) -> None:
        """Maps the tensors' memory; see `ZeroedTensors`.

        Attention reads keys and values in huge pages faster, because the processor looks fewer addresses up. So a slot
        takes its whole memory when its first token is written.
        """
        super().__init__(layout.tensors, "KV cache", kernels_choice=kernels_choice)
        self._num_entries = layout.num_entries

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def zero(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots or blocks, or all for None; returns the bytes written."""
        if slots is None:
            for tensor in self.tensors.values():
                tensor.zero_()
            return self.size_bytes
        for slot in slots:
            if not 0 <= slot < self._num_entries:
                raise SlotUnknown(slot, self._num_entries - 1)
        # One call for each tensor: a prefix cache gives thousands of blocks back at once.
        chosen = torch.tensor(sorted(set(slots)), dtype=torch.int64)
        for tensor in self.tensors.values():
            # torch fills no rows of float8.
            filled = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
            filled.index_fill_(0, chosen, 0)
        return sum(len(chosen) * tensor[0].nbytes for tensor in self.tensors.values())
