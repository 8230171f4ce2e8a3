"""Cuts one rank's part out of a whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from compiler_svc.models.kv_heads import kv_heads_of_rank
from compiler_svc.sharding.plan import PlannedTensor, Split, WeightPlan


def split_tensor(plan: WeightPlan, tensor: PlannedTensor, whole: Tensor, rank: int) -> Tensor:
    """The rank's part of a tensor, a view of it.

    Args:
        whole: The tensor as the checkpoint has it, of shape `tensor.shape`.

    Returns:
        A tensor of shape `plan.rank_shape(tensor)`.
    """
    match tensor.split:
        case Split.REPLICATED:
            return whole
        case Split.COLUMN:
            return torch.tensor_split(whole, plan.tp_degree, dim=0)[rank]
        case Split.ROW:
            return torch.tensor_split(whole, plan.tp_degree, dim=1)[rank]
        case Split.KV_HEADS:
            heads = kv_heads_of_rank(plan.config.num_key_value_heads, rank, plan.tp_degree)
            return whole[heads[0] * plan.config.head_dim : (heads[-1] + 1) * plan.config.head_dim]
