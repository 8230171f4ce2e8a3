"""The Llama family's module."""

from __future__ import annotations

import torch

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.layers.decoder import CausalLm, PreNormLayer
from compiler_svc.models.layers.ranks import Ranks


def build(description: ModelDescription, *, dtype: torch.dtype, ranks: Ranks) -> CausalLm:
    """One rank of a Llama model, with uninitialized parameters.

    Args:
        dtype: Dtype of the computation.
    """
    return CausalLm(description, PreNormLayer, dtype=dtype, ranks=ranks)
