"""Copies one rank's part of a parameter from the checkpoint's tensors, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from compiler_svc.models.divisions import Run

#: A part of a tensor: start and stop on every axis.
Block = tuple[tuple[int, int], ...]


def list_blocks(shape: Sequence[int], max_items: int) -> Iterator[Block]:
    """Divides a tensor into blocks of neighbouring items, in the order of the file.

    Args:
        max_items: Largest number of items in a block. A block takes as many entries of one axis as fit, with all
            entries of the later axes, for one entry of each earlier axis.
    """
    axis = next((number for number in range(len(shape)) if math.prod(shape[number + 1 :]) <= max_items), len(shape) - 1)
    entries = max(1, max_items // math.prod(shape[axis + 1 :]))
    later = tuple((0, length) for length in shape[axis + 1 :])
    for earlier in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], entries):
            own = (start, min(start + entries, shape[axis]))
            yield (*((one, one + 1) for one in earlier), own, *later)


def copy_block(whole: JoinedTensor, axis: int | None, runs: Sequence[Run], block: Block, target: Tensor) -> None:
    """Fills `target` with a block of one rank's part of a tensor, and casts it to the dtype of `target`.

    Args:
        whole: The whole tensor.
        axis: The axis that ranks share; None if every rank holds all of it.
        runs: The pieces of that axis that make up the rank's part.
        block: A block of the rank's part.
        target: Tensor with the block's shape.
    """
    if axis is None:
        whole.copy(block, target)
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
                whole.copy((*block[:axis], (source, source + stop - start), *block[axis + 1 :]), entries)
        offset += run.length


class JoinedTensor:
    """Tensors that are joined along one axis without copying them."""

    def __init__(self, tensors: Sequence[Tensor], axis: int = 0) -> None:
        """Takes the tensors in their order."""
        self._tensors = tensors
        self._axis = axis

    def copy(self, block: Block, target: Tensor) -> None:
        """Fills `target` with a block of the joined tensor, and casts it to the dtype of `target`."""
        first, last = block[self._axis]
        offset = 0
        for tensor in self._tensors:
            start, stop = max(offset, first), min(offset + tensor.shape[self._axis], last)
            if start < stop:
                own = (*block[: self._axis], (start - offset, stop - offset), *block[self._axis + 1 :])
                target.narrow(self._axis, start - first, stop - start).copy_(tensor[tuple(slice(*one) for one in own)])
            offset += tensor.shape[self._axis]
