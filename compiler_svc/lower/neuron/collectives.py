"""The collectives of graphs for Neuron: XLA's, over all ranks.

Registered in the interpreter that lowers for Neuron, and nowhere else: other processes have no XLA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import execution.collectives.operators  # noqa: F401 - defines the operators


@contextmanager
def xla_collectives() -> Iterator[None]:
    """Inside the block, `kiln::all_reduce` and `kiln::all_gather` of XLA tensors become XLA's, over all ranks."""
    library = torch.library.Library("kiln", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_reduce", _all_reduce, "XLA")  # type: ignore[no-untyped-call]
    library.impl("all_gather", _all_gather, "XLA")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no other way


def _all_reduce(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    model = _load_xla_model()
    total: Tensor = model.all_reduce(model.REDUCE_SUM, input, groups=_all_ranks(tp_degree), pin_layout=False)
    return total


def _all_gather(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    whole: Tensor = _load_xla_model().all_gather(
        input, dim=input.dim() - 1, groups=_all_ranks(tp_degree), pin_layout=False
    )
    return whole


def _all_ranks(tp_degree: int) -> list[list[int]]:
    """One group with every rank."""
    return [list(range(tp_degree))]


def _load_xla_model() -> Any:
    return import_module("torch_xla.core.xla_model")
