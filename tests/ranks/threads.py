"""Ranks as threads of this process, which meet to exchange tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from execution.collectives.operators import use_communicator

Result = TypeVar("Result")


class Meeting:
    """The meeting point at which ranks exchange tensors."""

    def __init__(self, tp_degree: int) -> None:
        self.barrier = threading.Barrier(tp_degree, timeout=60)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * tp_degree

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[rank] = tensor
        self.barrier.wait()
        everybody = list(self.tensors)
        self.barrier.wait()
        assert len({(part.shape, part.dtype) for part in everybody}) == 1
        return everybody


@dataclass(frozen=True)
class ThreadCommunicator:
    meeting: Meeting
    rank: int
    tp_degree: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self.meeting.exchange(self.rank, tensor)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim=-1)


def run_ranks(tp_degree: int, work: Callable[[int], Result]) -> list[Result]:
    """What `work` returns for every rank, all of them at the same time."""
    meeting = Meeting(tp_degree)

    def run(rank: int) -> Result:
        try:
            with use_communicator(ThreadCommunicator(meeting, rank, tp_degree)):
                return work(rank)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tp_degree) as pool:
        return list(pool.map(run, range(tp_degree)))
