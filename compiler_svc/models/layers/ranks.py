"""The ranks that a model is divided among. Graphs name no process group: the registered operators know theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import execution.collectives.operators  # noqa: F401 - registers torch.ops.kiln


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor-parallel ranks, as the modules of one of them see the others; one alone adds no collective to the graph.

    Partial results are summed in `reduce_dtype`; None: in the dtype they have.
    """

    tp_degree: int
    reduce_dtype: torch.dtype | None = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of the ranks' tensors, on every rank; same shape and dtype."""
        if self.tp_degree == 1:
            return partial
        if self.reduce_dtype in (None, partial.dtype):
            total: Tensor = torch.ops.kiln.all_reduce(partial, self.tp_degree)
            return total
        total = torch.ops.kiln.all_reduce(partial.to(self.reduce_dtype), self.tp_degree)
        return total.to(partial.dtype)

    def sum_exactly(self, partial: Tensor) -> Tensor:
        """As `all_reduce`, but in the tensors' dtype whatever `reduce_dtype` is: for what all else depends on."""
        total: Tensor = partial if self.tp_degree == 1 else torch.ops.kiln.all_reduce(partial, self.tp_degree)
        return total

    def find_largest(self, part: Tensor) -> Tensor:
        """The largest of the ranks' tensors […, 1], on every rank."""
        return part if self.tp_degree == 1 else self.all_gather(part).amax(-1, keepdim=True)

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors joined along the last axis in the order of ranks, on every rank."""
        if self.tp_degree == 1:
            return part
        whole: Tensor = torch.ops.kiln.all_gather(part, self.tp_degree)
        return whole
