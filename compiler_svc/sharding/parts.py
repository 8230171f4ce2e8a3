"""Copies one rank's part of a parameter, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from torch import Tensor

from compiler_svc.models.divisions import Run

#: A part of a tensor: start and stop on every axis.
Block = tuple[tuple[int, int], ...]
#: Fills a tensor with a block of a whole one, and casts it to the dtype of the first.
Values = Callable[[Block, Tensor], None]


def list_blocks(shape: Sequence[int], max_items: int) -> Iterator[Block]:
    """Divides a tensor into blocks of at most `max_items` neighbouring items, in the order of the file.

    A block takes as many entries of one axis as fit, with all of the later axes, for one entry of each earlier axis.
    """
    axis = next((number for number in range(len(shape)) if math.prod(shape[number + 1 :]) <= max_items), len(shape) - 1)
    entries = max(1, max_items // math.prod(shape[axis + 1 :]))
    later = tuple((0, length) for length in shape[axis + 1 :])
    for earlier in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], entries):
            own = (start, min(start + entries, shape[axis]))
            yield (*((one, one + 1) for one in earlier), own, *later)


def copy_block(whole: Values, axis: int | None, runs: Sequence[Run], block: Block, target: Tensor) -> None:
    """Fills `target` with a block of one rank's part of a tensor, and casts it to the dtype of `target`.

    Ranks share `axis`, of which `runs` make up the rank's part; None if every rank holds all of it.
    """
    if axis is None:
        whole(block, target)
        return
    first, last = block[axis]
    offset = 0
    for run in runs:
        start, stop = max(offset, first), min(offset + run.length, last)
        if start < stop:
            entries = target.narrow(axis, start - first, stop - start)
            if run.start is None:
                entries.zero_()
            else:
                source = run.start + start - offset
                whole((*block[:axis], (source, source + stop - start), *block[axis + 1 :]), entries)
        offset += run.length
