"""The collective operators that graphs of several ranks call: `kiln::all_reduce` and `kiln::all_gather`.

Importing this module registers them. Graphs name no process group: the communicator of the calling thread carries the
tensors. Compiled code does not use this module; it calls the same native functions as
`execution.collectives.communicator`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor

#: The dtypes that can be reduced and gathered.
COLLECTIVE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


class CollectiveError(RuntimeError):
    """A collective failed. No rank may use its result."""


class Communicator(Protocol):
    """The other ranks, as one rank sees them. Every rank calls the same collectives in the same order."""

    @property
    def tp_degree(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, added in rank order: bitwise equal on all ranks.

        Raises:
            CollectiveError: A rank is gone.
        """

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors, concatenated along the last axis in rank order.

        Raises:
            CollectiveError: A rank is gone.
        """


class _Current(threading.local):
    communicator: Communicator | None = None


_current: Final = _Current()


@contextmanager
def use_communicator(communicator: Communicator) -> Iterator[None]:
    """Inside the block, the operators that this thread runs use `communicator`."""
    previous, _current.communicator = _current.communicator, communicator
    try:
        yield
    finally:
        _current.communicator = previous


def _communicator(tp_degree: int) -> Communicator:
    communicator = _current.communicator
    if communicator is None:
        raise CollectiveError(f"a collective of {tp_degree} ranks in a thread that uses no communicator")
    if communicator.tp_degree != tp_degree:
        raise CollectiveError(f"a collective of {tp_degree} ranks among {communicator.tp_degree}")
    return communicator


def sum_by_communicator(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    """Adds the tensors that all ranks give, by the communicator that this thread uses: what `kiln::all_reduce` does."""
    return input.clone() if tp_degree == 1 else _communicator(tp_degree).all_reduce(input.contiguous())


def join_by_communicator(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    """Joins the tensors that all ranks give along the last axis, by the communicator: what `kiln::all_gather` does."""
    return input.clone() if tp_degree == 1 else _communicator(tp_degree).all_gather(input.contiguous())


def _fake_all_reduce(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    _check(input, tp_degree)
    return input.new_empty(input.shape)


def _fake_all_gather(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    _check(input, tp_degree)
    return input.new_empty((*input.shape[:-1], input.shape[-1] * tp_degree))


def _check(tensor: Tensor, tp_degree: int) -> None:
    """Reports wrong arguments when a graph is traced, not when it runs."""
    if tensor.dtype not in COLLECTIVE_DTYPES:
        accepted = ", ".join(str(dtype) for dtype in COLLECTIVE_DTYPES)
        raise TypeError(f"a collective of {tensor.dtype}; accepted: {accepted}")
    if tensor.dim() == 0 or tp_degree < 1:
        raise ValueError(f"a collective of {tensor.dim()} axes among {tp_degree} ranks; accepted: at least 1 of each")


_LIBRARY: Final = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _run, _fake in (
    ("all_reduce", sum_by_communicator, _fake_all_reduce),
    ("all_gather", join_by_communicator, _fake_all_gather),
):
    _LIBRARY.define(  # type: ignore[no-untyped-call]
        f"{_name}(Tensor input, int tp_degree) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides),
    )
    _LIBRARY.impl(_name, _run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kiln::{_name}", _fake, lib=_LIBRARY)
