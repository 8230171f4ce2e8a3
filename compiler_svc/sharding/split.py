"""Copies one rank's part out of a whole tensor, a few rows at a time."""

from __future__ import annotations

from torch import Tensor

from compiler_svc.sharding.cut import Cut


def copy_rows(whole: Tensor, cut: Cut | None, rank: int, first_row: int, rows: Tensor) -> None:
    """Fills `rows` with rows of a rank's part of a tensor, cast to its dtype.

    Args:
        whole: The tensor as the checkpoint has it.
        cut: How it is divided; None: every rank holds all of it.
        first_row: The row of the part that `rows` begins with.
        rows: As many rows of the part as are wanted.
    """
    if cut is None:
        rows.copy_(whole[first_row : first_row + len(rows)])
    elif cut.axis == 0:
        _copy_runs(whole, cut, rank, first_row, rows)
    else:
        _copy_columns(whole[first_row : first_row + len(rows)], cut, rank, rows)


def _copy_runs(whole: Tensor, cut: Cut, rank: int, first_row: int, rows: Tensor) -> None:
    """Where rows are divided: the parts of the runs that lie within the wanted rows."""
    offset = -first_row
    for run in cut.runs[rank]:
        start, stop = max(offset, 0), min(offset + run.length, len(rows))
        if start < stop and run.start is None:
            rows[start:stop].zero_()
        elif start < stop and run.start is not None:
            source = run.start + start - offset
            rows[start:stop].copy_(whole[source : source + stop - start])
        offset += run.length


def _copy_columns(whole: Tensor, cut: Cut, rank: int, rows: Tensor) -> None:
    """Where columns are divided: the runs of every row."""
    offset = 0
    for run in cut.runs[rank]:
        columns = rows[:, offset : offset + run.length]
        if run.start is None:
            columns.zero_()
        else:
            columns.copy_(whole[:, run.start : run.start + run.length])
        offset += run.length
