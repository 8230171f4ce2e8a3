"""The KV cache of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bundle.manifest import StateLayout
from execution.dtypes import TORCH_DTYPES
from execution.errors import SlotUnknown


class RankState:
    """State tensors by name, zeroed at the start. Their first axis is the slot; the last row is the scratch slot."""

    def __init__(self, layout: StateLayout) -> None:
        """Allocates the tensors. The operating system commits each page when it is first touched."""
        self._num_slots = layout.num_slots
        self.tensors: dict[str, Tensor] = {
            spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in layout.tensors
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def zero(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots, or all for None; returns the bytes written.

        Raises:
            SlotUnknown: There is no such slot. Nothing is written then.
        """
        chosen = range(self._num_slots + 1) if slots is None else sorted(set(slots))
        for slot in chosen:
            if not 0 <= slot <= self._num_slots:
                raise SlotUnknown(slot, self._num_slots)
        written = 0
        for tensor in self.tensors.values():
            for slot in chosen:
                row = tensor[slot]
                row.zero_()
                written += row.nbytes
        return written
