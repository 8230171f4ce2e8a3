"""How ranks divide an axis of a tensor, as data: not at all, into equal parts, or by attention heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from compiler_svc.models.head_layout import PADDING_HEAD, HeadLayout, lay_out_heads


@dataclass(frozen=True, slots=True)
class Run:
    """`length` neighbouring entries of an axis, from `start` in the whole tensor on; without a start, zeros instead."""

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
    """Whole attention heads, of `head_dim` entries each: those that `head_layout.lay_out_heads` gives to each rank."""

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
class Grouped:
    """As another axis is divided, with `entries` for each group of its `size` neighbouring ones, which stay whole."""

    base: Axis
    size: int
    entries: int

    def fits(self, tp_degree: int) -> bool:
        """Whether every part consists of whole groups."""
        runs = (run for runs in self.base.divide(tp_degree) for run in runs)
        return all((run.start or 0) % self.size == run.length % self.size == 0 for run in runs)

    def divide(self, length: int, tp_degree: int) -> RunsByRank:
        """The parts of the axis, which has `length` entries."""
        assert length == self.base.length // self.size * self.entries
        return tuple(tuple(map(self._scale, runs)) for runs in self.base.divide(tp_degree))

    def _scale(self, run: Run) -> Run:
        start = None if run.start is None else run.start // self.size * self.entries
        return Run(start, run.length // self.size * self.entries)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a whole tensor.

    Attributes:
        division: How ranks share it; None if every rank holds all of it.
        attribute: The attribute of `config.json` that gives the length, for errors.
        parts: Axes that lie one after another on this one, if each is divided by itself, as in a fused projection.
    """

    length: int
    division: Evenly | ByHeads | Grouped | None = None
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


def group_axis(axis: Axis, size: int, entries: int) -> Axis:
    """The axis of what stands for groups of `size` entries of another one, `entries` for each."""
    division = Grouped(axis, size, entries) if axis.is_divided else None
    return Axis(axis.length // size * entries, division, axis.attribute)


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
