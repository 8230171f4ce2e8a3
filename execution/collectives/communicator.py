"""A rank process's side of the memory through which ranks exchange tensors."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from typing import Final, Self

import torch
from torch import Tensor

from execution.collectives.library import ABORTED, DONE, TIMED_OUT, NativeCommunicator, load_collective_library
from execution.collectives.operators import CollectiveError, use_communicator
from execution.errors import CollectivesMissing

#: A rank that waits for the others spins this long before it sleeps, if each rank can have a core.
SPIN_S: Final = 50e-6
#: A rank that waits longer gives up. This is the last resort if no other process notices that a rank is stuck.
TIMEOUT_S: Final = 300.0

#: Values of `DType` in execution/native/collectives.h.
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2, torch.float16: 3}
_FAILURES: Final = {ABORTED: "another rank failed", TIMED_OUT: "another rank did not come"}


class SharedCommunicator:
    """See `execution.collectives.operators.Communicator`. Belongs to the thread that calls `joined`."""

    def __init__(self, fd: int, rank: int, tp_degree: int, timeout_s: float = TIMEOUT_S) -> None:
        library = load_collective_library()
        if library is None:
            raise CollectivesMissing(tp_degree)
        self.tp_degree = tp_degree
        self._library = library
        self._memory = mmap.mmap(fd, 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        has_cores = len(os.sched_getaffinity(0)) >= tp_degree
        self._native = NativeCommunicator(
            memory=self._address,
            rank=rank,
            tp_degree=tp_degree,
            spin_ns=int(SPIN_S * 1e9) if has_cores else 0,
            timeout_ns=int(timeout_s * 1e9),
        )

    @contextmanager
    def joined(self) -> Iterator[Self]:
        """Inside the block, this thread's collectives use this communicator, in compiled executables too."""
        self._library.kiln_use(byref(self._native))
        try:
            with use_communicator(self):
                yield self
        finally:
            self._library.kiln_use(None)

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has failed. If so, no collective succeeds until the parent has repaired the memory."""
        return bool(self._library.kiln_is_aborted(self._address))

    def abort(self) -> None:
        """Fails the collective in which other ranks wait, because this rank will not join it."""
        self._library.kiln_abort(self._address)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in rank order. 16-bit floats are added in float32 and rounded once."""
        total = torch.empty_like(tensor)
        dtype, count = _DTYPES[tensor.dtype], tensor.numel()
        _check(self._library.kiln_all_reduce(byref(self._native), dtype, tensor.data_ptr(), count, total.data_ptr()))
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors, concatenated along the last axis in rank order."""
        num_columns = tensor.shape[-1]
        whole = tensor.new_empty((*tensor.shape[:-1], num_columns * self.tp_degree))
        num_rows, row_bytes = tensor.numel() // num_columns, num_columns * tensor.element_size()
        _check(
            self._library.kiln_all_gather(byref(self._native), tensor.data_ptr(), num_rows, row_bytes, whole.data_ptr())
        )
        return whole


def _check(outcome: int) -> None:
    if outcome != DONE:
        raise CollectiveError(f"a collective failed: {_FAILURES[outcome]}")
