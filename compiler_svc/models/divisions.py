"""How ranks divide an axis of a tensor, as data: not at all, into equal parts, or by attention heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from compiler_svc.models.head_layout import PADDING_HEAD, HeadLayout, lay_out_heads


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring entries of an axis.

    Attributes:
        start: The first one in the whole tensor; None if a part holds zeros instead.
        length: How many.
    """

    start: int | None
    length: int


#: For each rank, what its part of an axis consists of, in order. All parts are equally long.
RunsByRank = tuple[tuple[Run, ...], ...]


@dataclass(frozen=True, slots=True)
class Evenly:
    """Equal parts in the order of the ranks. If the axis does not divide evenly, zeros follow its end."""

    def divide(self, length: int, tp_degree: int) -> RunsByRank:
        """The parts of an axis of `length` entries."""
        return _divide_evenly(length, tp_degree)


@dataclass(frozen=True, slots=True)
class ByHeads:
    """Whole attention heads: those that `head_layout.lay_out_heads` gives to each rank.

    Attributes:
        kind: Whether the axis holds query heads or KV heads, of `head_dim` entries each.
    """

    kind: Literal["query", "kv"]
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def layout(self, tp_degree: int) -> HeadLayout:
        """The heads of each rank."""
        return lay_out_heads(self.num_query_heads, self.num_kv_heads, tp_degree)

    def divide(self, length: int, tp_degree: int) -> RunsByRank:
        """The parts of an axis of `length` entries."""
        layout = self.layout(tp_degree)
        heads_by_rank = layout.query_heads if self.kind == "query" else layout.kv_heads
        assert length == self.head_dim * (self.num_query_heads if self.kind == "query" else self.num_kv_heads)
        return tuple(_runs_of(heads, self.head_dim) for heads in heads_by_rank)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tensor.

    Attributes:
        length: Entries of the whole tensor.
        division: How ranks share it; None if every rank holds all of it.
        attribute: The attribute of `config.json` that gives the length, for errors.
        parts: Axes that lie one after another on this one, if each is divided by itself, as in a fused projection.
    """

    length: int
    division: Evenly | ByHeads | None = None
    attribute: str = ""
    parts: tuple[Axis, ...] = ()

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold parts of it."""
        return self.division is not None or any(part.is_divided for part in self.parts)

    def divide(self, tp_degree: int) -> RunsByRank:
        """What each rank holds."""
        return _divide(self, tp_degree)

    def count_copies(self, tp_degree: int) -> int:
        """How many ranks hold each entry; all entries have equally many copies, whatever the division is."""
        return (
            sum(run.length for runs in self.divide(tp_degree) for run in runs if run.start is not None) // self.length
        )

    def part_length(self, tp_degree: int) -> int:
        """Entries of every rank's part, padding included."""
        return self.length if tp_degree == 1 and not self.is_divided else _part_length(self, tp_degree)


def join_axes(*parts: Axis) -> Axis:
    """The axis of tensors that are joined along it; every rank holds its part of each."""
    return Axis(sum(part.length for part in parts), parts=parts)


def share_of(length: int, tp_degree: int) -> int:
    """Entries of one of `tp_degree` equal parts; the last ones are padded if the length does not divide evenly."""
    return -(-length // tp_degree)


@lru_cache(maxsize=4096)
def _divide(axis: Axis, tp_degree: int) -> RunsByRank:
    if axis.parts:
        return _divide_joined(axis.parts, tp_degree)
    if axis.division is None:
        return ((Run(0, axis.length),),) * tp_degree
    return axis.division.divide(axis.length, tp_degree)


@lru_cache(maxsize=4096)
def _part_length(axis: Axis, tp_degree: int) -> int:
    return sum(run.length for run in axis.divide(tp_degree)[0])


def _divide_joined(parts: Sequence[Axis], tp_degree: int) -> RunsByRank:
    by_rank: list[list[Run]] = [[] for _ in range(tp_degree)]
    offset = 0
    for part in parts:
        for runs, own in zip(by_rank, part.divide(tp_degree), strict=True):
            runs.extend(Run(None if run.start is None else offset + run.start, run.length) for run in own)
        offset += part.length
    return tuple(map(_join_runs, by_rank))


@lru_cache
def _divide_evenly(length: int, tp_degree: int) -> RunsByRank:
    share = share_of(length, tp_degree)
    by_rank = []
    for rank in range(tp_degree):
        start = min(rank * share, length)
        stop = min(start + share, length)
        by_rank.append(_join_runs((Run(start, stop - start), Run(None, share - (stop - start)))))
    return tuple(by_rank)


def _runs_of(heads: Sequence[int], head_dim: int) -> tuple[Run, ...]:
    return _join_runs(Run(None if head == PADDING_HEAD else head * head_dim, head_dim) for head in heads)


def _join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same runs with empty ones left out and neighbours made one."""
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
