"""Ranks of one model that run in one process: in a thread each, one at a time.

Each runs to its next collective, then the next rank runs to its own, and the tensors that they give there become one.
So a graph on one device can hold all ranks, with additions and concatenations in the place of their collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TypeVar

import torch
from torch import Tensor

from execution.collectives.operators import CollectiveError, use_communicator

T = TypeVar("T")


class RankTurns:
    """The ranks of one model. Every call of `run` lets each of them compute once."""

    def __init__(self, tp_degree: int) -> None:
        self.tp_degree = tp_degree
        self._turns = [threading.Semaphore(0) for _ in range(tp_degree)]
        self._given: list[Tensor | None] = [None] * tp_degree
        self._met: Tensor | None = None
        self._errors: list[BaseException] = []
        self._num_ended = 0

    def run(self, compute: Sequence[Callable[[], T]]) -> list[T]:
        """Lets each rank compute, and returns what they returned, in order. Raises what the first rank to fail raised;
        the others end too, and the ranks cannot run again.
        """
        results: dict[int, T] = {}
        self._num_ended = 0
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, one, results)) for rank, one in enumerate(compute)
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        # The last rank has passed the turn on.
        self._turns[0].acquire(blocking=False)
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(self.tp_degree)]

    def exchange(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Gives a rank's tensor, waits for the others', and returns what all of them make."""
        self._given[rank] = tensor
        self._pass_on(rank)
        if rank == 0:
            given = [one for one in self._given if one is not None]
            self._require(len(given))
            self._met, self._given = combine(given), [None] * self.tp_degree
        assert self._met is not None
        return self._met

    def _run_rank(self, rank: int, compute: Callable[[], T], results: dict[int, T]) -> None:
        self._turns[rank].acquire()
        try:
            if self._errors:
                return
            with use_communicator(_RankInTurn(self, rank)):
                results[rank] = compute()
            self._num_ended += 1
        except BaseException as error:  # noqa: BLE001 - raised by the thread that called
            self._errors.append(error)
        finally:
            self._turns[(rank + 1) % self.tp_degree].release()

    def _pass_on(self, rank: int) -> None:
        self._require(self.tp_degree - self._num_ended)
        self._turns[(rank + 1) % self.tp_degree].release()
        self._turns[rank].acquire()
        if self._errors:
            raise CollectiveError("another rank has failed")

    def _require(self, num_ranks: int) -> None:
        if num_ranks < self.tp_degree:
            raise CollectiveError(f"a collective of {self.tp_degree} ranks that {num_ranks} take part in")


class _RankInTurn:
    """The other ranks as one of them sees them; a `Communicator`."""

    def __init__(self, turns: RankTurns, rank: int) -> None:
        self._turns = turns
        self._rank = rank

    @property
    def tp_degree(self) -> int:
        return self._turns.tp_degree

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._turns.exchange(self._rank, tensor, partial(reduce, torch.add)).clone()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._turns.exchange(self._rank, tensor, lambda tensors: torch.cat(list(tensors), dim=-1)).clone()
