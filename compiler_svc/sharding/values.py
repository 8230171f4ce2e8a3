"""The values of sources: each node of a tree reads blocks of those below it, so that nothing is copied whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from bundle.abi.formats import FORMATS, WeightFormat
from compiler_svc.models.layers.alibi import compute_slopes
from compiler_svc.models.layers.rope import compute_frequencies
from compiler_svc.models.sources import (
    ITEMS_PER_WORD,
    Compressed,
    Items,
    Joined,
    Quantized,
    RankSource,
    RopeSource,
    Scales,
    Sliced,
    SlopeSource,
    Source,
    Stored,
    Transposed,
    Written,
    find_place,
    list_tensors,
)
from compiler_svc.sharding.parts import Block, Values, list_blocks
from compiler_svc.weights.unpacking import OpenedMatrix
from execution.dtypes import TORCH_DTYPES

#: Items of a matrix that are looked at together for its scales: 8 MiB of float32.
_SCANNED_ITEMS: Final = 2 << 20


#: Quantizes a block of a matrix: its items, and the scales and zero points of groups.
Groups = Callable[[Block], tuple[Tensor, Tensor, Tensor]]


class Reader(Protocol):
    """Reads a checkpoint's tensors, as `TensorReader` does."""

    def read(self, name: str) -> Tensor:
        """Reads a tensor that is not quantized."""
        ...

    def unpack(self, name: str) -> OpenedMatrix | None:
        """Opens a matrix that is; None if it is not."""
        ...

    def trim(self) -> None:
        """Releases memory."""
        ...

    def check_finite(self, names: Iterable[str]) -> None:
        """Names the first number of some tensors that is not finite."""
        ...

    def refuse(self, name: str, value: str, accepted: str) -> NoReturn:
        """Raises the error of a checkpoint whose tensor has a value that is not accepted."""
        ...


class SourceReader:
    """Opens sources. A matrix's scales are computed when it is first opened, and kept for its other ranks.

    Matrices that the checkpoint has quantized keep their items and scales where the format allows it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._scales: dict[tuple[Source, str], Tensor] = {}

    def open(self, source: Source, rank: int) -> Values:
        """Opens the values that one rank's shard has a part of."""
        match source:
            case Stored(tensor):
                return self._open_stored(tensor)
            case Transposed(matrix):
                return partial(_copy_transposed, self.open(matrix, rank))
            case Sliced(whole, start):
                return partial(_copy_slice, self.open(whole, rank), start)
            case Joined(parts):
                return partial(_copy_joined, [(part.length, self.open(part, rank)) for part in parts])
            case Items() | Scales() | Compressed():
                return self._open_quantized(source, rank)
            case _:
                return _open_derived(source, rank)

    def _open_stored(self, name: str) -> Values:
        matrix = self._reader.unpack(name)
        if matrix is not None:
            return partial(_copy_rows, matrix)
        tensor = self._reader.read(name)
        # A scale may have no dimension in place of one.
        return partial(_copy_tensor, tensor if tensor.dim() else tensor[None])

    def _open_quantized(self, source: Items | Scales | Compressed, rank: int) -> Values:
        if isinstance(source, Compressed):
            return self._open_compressed(source, rank)
        row = FORMATS[source.format]
        kept = self._find_kept(source)
        if row.group:
            return self._open_grouped(source, rank, kept)
        key = source.matrix, source.format
        if key not in self._scales:
            self._scales[key] = self._find_scales(source, rank) if kept is None else _join_scales(kept)
        scales = self._scales[key].expand(source.length)
        if isinstance(source, Scales):
            return partial(_copy_tensor, scales)
        if kept is not None:
            parts = [(part.length, partial(_copy_tensor, matrix.items[part.start :])) for part, matrix in kept]
            return partial(_copy_joined, parts)
        return partial(_copy_items, self.open(source.matrix, rank), scales, row)

    def _open_grouped(
        self, source: Items | Scales, rank: int, kept: list[tuple[Sliced, OpenedMatrix]] | None
    ) -> Values:
        row, has_scales = FORMATS[source.format], isinstance(source, Scales)
        if kept is None:
            copy_groups = partial(_copy_groups, self._open_groups(source, rank), row, has_scales)
            return partial(_copy_by_rows, copy_groups, _count_rows(source))
        copy = _copy_kept_scales if has_scales else _copy_kept_items
        parts = [(part.length, partial(_copy_slice, partial(copy, matrix, row), part.start)) for part, matrix in kept]
        return partial(_copy_joined, parts)

    def _open_compressed(self, source: Compressed, rank: int) -> Values:
        row, arguments = FORMATS[source.format], (source.matrix, source.shape, source.format)
        if source.part == "shape":
            return partial(_copy_tensor, torch.tensor(source.shape, dtype=torch.int32))
        if row.group:
            groups, num_rows = self._open_groups(source, rank), _count_rows(source)
            if source.part == "zeros":
                copy_zeros = partial(_copy_zeros, groups, row, source.shape[0])
                return partial(_copy_by_rows, copy_zeros, max(1, num_rows // ITEMS_PER_WORD))
            copy = _copy_factors if source.part == "scales" else _copy_words
            return partial(_copy_by_rows, partial(copy, groups, row), num_rows)
        if source.part == "items":
            return self.open(Items(*arguments), rank)
        return partial(_copy_column, self.open(Scales(*arguments, is_spread=True), rank))

    def _open_groups(self, source: Quantized, rank: int) -> Groups:
        return partial(self._quantize_groups, source, self.open(source.matrix, rank))

    def _quantize_groups(self, source: Quantized, matrix: Values, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes a block of a matrix, of whole groups: its items, float32 [outputs, inputs], and the scales and zero
        points of groups, float32 [outputs, groups].

        Zero points are items, because checkpoints have no others. So each group holds 0, and its ends may be cut by
        half a step.
        """
        row = FORMATS[source.format]
        values = torch.empty([stop - start for start, stop in block])
        matrix(block, values)
        if not values.isfinite().all():
            self._reader.check_finite(list_tensors(source.matrix))
        groups = values.view(len(values), -1, row.group)
        least, most = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
        scales = ((most - least) / row.divisor).clamp_(min=row.least_scale)
        # What kernels compute: the largest item times the scale.
        if not (scales * row.divisor).isfinite().all():
            self._refuse_range(source, block, least[..., 0], most[..., 0])
        zeros = (-least / scales).round_()
        codes = (groups / scales + zeros).round_().clamp_(*row.bounds)
        return codes.flatten(1), scales[..., 0], zeros[..., 0]

    def _refuse_range(self, source: Quantized, block: Block, least: Tensor, most: Tensor) -> NoReturn:
        """Names the group of a block whose smallest and largest weight, [outputs, groups], are furthest apart."""
        size, apart = FORMATS[source.format].group, most.double() - least.double()
        output, group = divmod(int(apart.argmax()), apart.shape[1])
        name, place = find_place(source.matrix, block[0][0] + output, block[1][0] + group * size)
        value = f"{least[output, group]:g} to {most[output, group]:g} in the group of {size} weights at {place}"
        self._reader.refuse(name, value, "groups whose largest and smallest weight differ by a float32")

    def _find_kept(self, source: Quantized) -> list[tuple[Sliced, OpenedMatrix]] | None:
        """The parts of a matrix that the checkpoint has in the source's format; None if one is something else."""
        row, kept = FORMATS[source.format], []
        for part in source.matrix.parts if isinstance(source.matrix, Joined) else (source.matrix,):
            if not isinstance(part, Sliced) or not isinstance(part.whole, Stored):
                return None
            matrix = self._reader.unpack(part.whole.tensor)
            if matrix is None or not matrix.matrix.fits(row):
                return None
            kept.append((part, matrix))
        # Parts have a scale each.
        return kept if row.is_per_channel or len(kept) == 1 else None

    def _find_scales(self, source: Quantized, rank: int) -> Tensor:
        """The scales of a matrix, float32 [outputs] or [1]."""
        row, largest = FORMATS[source.format], torch.zeros(source.shape[0])
        for block in list_blocks(source.shape, _SCANNED_ITEMS):
            values = torch.empty([stop - start for start, stop in block])
            self.open(source.matrix, rank)(block, values)
            own = largest[slice(*block[0])]
            torch.maximum(own, values.abs().amax(1), out=own)
            self._reader.trim()
        if not largest.isfinite().all():
            self._reader.check_finite(list_tensors(source.matrix))
        if not row.is_per_channel:
            largest = largest.amax(0, keepdim=True)
        return (largest / row.divisor).clamp(min=row.least_scale)


def _open_derived(source: RopeSource | SlopeSource | RankSource | Written, rank: int) -> Values:
    return _clear if isinstance(source, Written) else partial(_copy_tensor, _compute(source, rank))


def _compute(source: RopeSource | SlopeSource | RankSource, rank: int) -> Tensor:
    if isinstance(source, RopeSource):
        return compute_frequencies(source)
    if isinstance(source, SlopeSource):
        return compute_slopes(source)
    return torch.tensor([rank], dtype=torch.int32)


def _join_scales(kept: Sequence[tuple[Sliced, OpenedMatrix]]) -> Tensor:
    """The scales of the outputs of several parts, or a single one."""
    if len(kept) == 1 and kept[0][1].scales.numel() == 1:
        return kept[0][1].scales[0]
    return torch.cat(
        [
            matrix.scales.expand(matrix.matrix.shape[0], 1)[part.start : part.start + part.length, 0]
            for part, matrix in kept
        ]
    )


def _copy_rows(matrix: OpenedMatrix, block: Block, target: Tensor) -> None:
    rows, columns = block
    target.copy_(matrix.read_rows(*rows)[:, slice(*columns)])


def _clear(_: Block, target: Tensor) -> None:
    target.zero_()


def _copy_tensor(tensor: Tensor, block: Block, target: Tensor) -> None:
    target.copy_(tensor[tuple(slice(*one) for one in block)])


def _copy_transposed(matrix: Values, block: Block, target: Tensor) -> None:
    matrix(block[::-1], target.t())


def _copy_slice(whole: Values, offset: int, block: Block, target: Tensor) -> None:
    (start, stop), *others = block
    whole(((offset + start, offset + stop), *others), target)


def _copy_joined(parts: Sequence[tuple[int, Values]], block: Block, target: Tensor) -> None:
    """`parts` have their entries along the first axis."""
    (first, last), *others = block
    offset = 0
    for length, copy in parts:
        start, stop = max(offset, first), min(offset + length, last)
        if start < stop:
            copy(((start - offset, stop - offset), *others), target[start - first : stop - first])
        offset += length


def _find_inputs(row: WeightFormat, size: int, block: Block) -> tuple[int, int]:
    """The inputs that the columns of a block are for, which has `size` of them for each group."""
    first, last = block[1]
    assert first % size == last % size == 0, "blocks consist of whole groups"
    return first // size * row.group, last // size * row.group


def _copy_kept_items(matrix: OpenedMatrix, row: WeightFormat, block: Block, target: Tensor) -> None:
    first, last = _find_inputs(row, row.group // 2, block)
    target.copy_(_pack(matrix.read_items(*block[0])[:, first:last]))


def _copy_kept_scales(matrix: OpenedMatrix, row: WeightFormat, block: Block, target: Tensor) -> None:
    first, last = _find_inputs(row, 2, block)
    target.copy_(matrix.read_groups(*block[0], torch.arange(first, last, row.group)).flatten(1))


def _copy_by_rows(copy: Values, num_rows: int, block: Block, target: Tensor) -> None:
    """Copies a block some rows at a time."""
    (first, last), *others = block
    for start in range(first, last, num_rows):
        stop = min(start + num_rows, last)
        copy(((start, stop), *others), target[start - first : stop - first])


def _copy_column(vector: Values, block: Block, target: Tensor) -> None:
    """Copies entries of a tensor of one axis into the only column of a block."""
    vector(block[:1], target[:, 0])


def _copy_groups(groups: Groups, row: WeightFormat, has_scales: bool, block: Block, target: Tensor) -> None:
    """Quantizes the groups of a block of items, or of scales."""
    first, last = _find_inputs(row, 2 if has_scales else row.group // 2, block)
    codes, scales, zeros = groups((block[0], (first, last)))
    target.copy_(torch.stack([scales, -zeros * scales], -1).flatten(1) if has_scales else _pack(codes))


def _copy_words(groups: Groups, row: WeightFormat, block: Block, target: Tensor) -> None:
    codes, _, _ = groups((block[0], _find_inputs(row, row.group // ITEMS_PER_WORD, block)))
    target.copy_(_join_words(codes))


def _copy_factors(groups: Groups, row: WeightFormat, block: Block, target: Tensor) -> None:
    _, scales, _ = groups((block[0], _find_inputs(row, 1, block)))
    target.copy_(scales)


def _copy_zeros(groups: Groups, row: WeightFormat, num_outputs: int, block: Block, target: Tensor) -> None:
    first, last = (number * ITEMS_PER_WORD for number in block[0])
    _, _, zeros = groups(((first, min(last, num_outputs)), _find_inputs(row, 1, block)))
    target.copy_(_join_words(zeros.t()).t())


def _pack(codes: Tensor) -> Tensor:
    """Two numbers from 0 to 15 in each byte, uint8 [rows, codes / 2]."""
    first, second = codes.to(torch.uint8).view(len(codes), -1, 2, 16).unbind(2)
    return (first | (second << 4)).flatten(1)


def _join_words(codes: Tensor) -> Tensor:
    """Eight numbers from 0 to 15 in each int32 [rows, codes / 8], the first in the low bits; zeros fill the last."""
    filled = pad(codes.to(torch.int32), (0, -codes.shape[1] % ITEMS_PER_WORD))
    shifts = torch.arange(0, 4 * ITEMS_PER_WORD, 4, dtype=torch.int32)
    return (filled.view(len(filled), -1, ITEMS_PER_WORD) << shifts).sum(-1, dtype=torch.int32)


def _count_rows(source: Quantized) -> int:
    """Outputs whose groups are quantized together."""
    return max(1, _SCANNED_ITEMS // source.shape[1])


def _copy_items(matrix: Values, scales: Tensor, row: WeightFormat, block: Block, target: Tensor) -> None:
    """`scales` has one for each output."""
    values = torch.empty(target.shape)
    matrix(block, values)
    values /= scales[slice(*block[0]), None]
    if row.item == "int8":
        values.round_()
    # A target of another dtype gets what the items are, too.
    target.copy_(values.clamp_(*row.bounds).to(TORCH_DTYPES[row.item]))
