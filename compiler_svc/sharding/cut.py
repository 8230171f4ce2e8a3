"""Cuts: how one axis of a tensor is divided among ranks, stated as runs of the axis and of zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from compiler_svc.models.head_layout import PADDING_HEAD
from compiler_svc.models.shares import share_of


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring entries of an axis.

    Attributes:
        start: The first one in the whole tensor; None where a part holds zeros instead.
        length: How many.
    """

    start: int | None
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis divided among ranks.

    Attributes:
        axis: 0 or 1.
        length: Entries of every rank's part.
        runs: For each rank, what its part consists of, in order.
    """

    axis: int
    length: int
    runs: tuple[tuple[Run, ...], ...]


@lru_cache
def cut_evenly(axis: int, length: int, tp_degree: int) -> Cut:
    """Equal parts in rank order. Where the axis does not divide evenly, zeros follow its end."""
    share = share_of(length, tp_degree)
    runs = []
    for rank in range(tp_degree):
        start = min(rank * share, length)
        stop = min(start + share, length)
        runs.append(_join((Run(start, stop - start), Run(None, share - (stop - start)))))
    return Cut(axis, share, tuple(runs))


@lru_cache
def cut_heads(axis: int, heads_by_rank: tuple[tuple[int, ...], ...], head_dim: int) -> Cut:
    """Whole attention heads: the ones that a `HeadLayout` gives to each rank, of `head_dim` entries each."""
    return Cut(axis, len(heads_by_rank[0]) * head_dim, tuple(_runs_of(heads, head_dim) for heads in heads_by_rank))


def _runs_of(heads: Sequence[int], head_dim: int) -> tuple[Run, ...]:
    return _join(Run(None if head == PADDING_HEAD else head * head_dim, head_dim) for head in heads)


def _join(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same with empty runs left out and neighbours made one."""
    joined: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        last = joined[-1] if joined else None
        if last is not None and _continues(last, run):
            joined[-1] = Run(last.start, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def _continues(last: Run, run: Run) -> bool:
    if last.start is None or run.start is None:
        return last.start is run.start
    return last.start + last.length == run.start
