"""Ranks as threads of the test's own process, for graphs whose collectives need no rank processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from execution.collectives import use_communicator

ResultT = TypeVar("ResultT")


class ThreadCommunicator:
    """One rank's end of a few lists that all ranks' threads share."""

    def __init__(self, rank: int, tp_degree: int, barrier: threading.Barrier, posted: list[Tensor | None]) -> None:
        self._rank = rank
        self.tp_degree = tp_degree
        self._barrier = barrier
        self._posted = posted

    def all_reduce(self, tensor: Tensor) -> Tensor:
        first, *rest = self._exchange(tensor)
        wide = torch.float32 if tensor.is_floating_point() else tensor.dtype
        total = first.to(wide)
        for other in rest:
            total = total + other.to(wide)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._posted[self._rank] = tensor
        self._barrier.wait(30)
        posted = [one for one in self._posted if one is not None]
        self._barrier.wait(30)
        return posted


def run_ranks(tp_degree: int, run: Callable[[int], ResultT]) -> list[ResultT]:
    """Calls `run(rank)` for all ranks at once, with a communicator among them; returns the results in rank order."""
    barrier, posted = threading.Barrier(tp_degree), [None] * tp_degree

    def run_one(rank: int) -> ResultT:
        try:
            with torch.no_grad(), use_communicator(ThreadCommunicator(rank, tp_degree, barrier, posted)):
                return run(rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp_degree) as pool:
        return list(pool.map(run_one, range(tp_degree)))
