"""Sums and joins over tensor-parallel ranks. Graphs name no process group: the registered operators know theirs."""

from __future__ import annotations

import torch
from torch import Tensor


def all_reduce(partial: Tensor, tp_degree: int) -> Tensor:
    """Sum of the ranks' tensors, on every rank."""
    if tp_degree == 1:
        return partial
    total: Tensor = torch.ops.kiln.all_reduce(partial)
    return total


def all_gather(part: Tensor, tp_degree: int) -> Tensor:
    """The ranks' tensors joined along the last axis in the order of ranks, on every rank."""
    if tp_degree == 1:
        return part
    whole: Tensor = torch.ops.kiln.all_gather(part)
    return whole
