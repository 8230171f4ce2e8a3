"""The values of a checkpoint's quantized matrices, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from bundle.abi.formats import WeightFormat
from bundle.errors import FieldViolation
from compiler_svc.models.packings import Packing
from compiler_svc.weights.headers import TensorHeader
from compiler_svc.weights.packed import PackedMatrix


class QuantizedMatrix(Protocol):
    """A matrix [outputs, inputs] that a checkpoint has quantized, as its headers say."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        ...

    def fits(self, row: WeightFormat) -> bool:
        """Whether a format can have its items and scales as they are."""
        ...


class OpenedMatrix(Protocol):
    """Its values. Only those that fit a format have items, scales and groups."""

    @property
    def matrix(self) -> QuantizedMatrix:
        """What its headers say."""
        ...

    @property
    def items(self) -> Tensor:
        """Items as the checkpoint has them."""
        ...

    @property
    def scales(self) -> Tensor:
        """Scales, float32: a row of them for each output or for some outputs."""
        ...

    def read_rows(self, start: int, stop: int) -> Tensor:
        """The weights of outputs `start` to `stop`, float32 [outputs, inputs]."""
        ...

    def read_items(self, start: int, stop: int) -> Tensor:
        """The items of outputs `start` to `stop` [outputs, inputs]."""
        ...

    def read_groups(self, start: int, stop: int, inputs: Tensor) -> Tensor:
        """What makes weights of the items of some inputs: a factor, and what to add; float32 [outputs, inputs, 2]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedMatrix:
    """An opened quantized matrix: items as the checkpoint has them; scales and zero points, float32, a row of them for
    each output or for some outputs; the group of each input, none if groups are of equal size.
    """

    matrix: PackedMatrix
    items: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None

    @classmethod
    def open(cls, matrix: PackedMatrix, read: Callable[[TensorHeader], Tensor]) -> Self:
        """Reads what is small of a matrix."""
        packing = matrix.packing
        scales = read(matrix.scales).to(torch.float32)
        zeros = None if matrix.zeros is None else _open_zeros(packing, read(matrix.zeros))
        groups = None if matrix.groups is None else read(matrix.groups).to(torch.int64)
        if "scales" in packing.transposed:
            scales, zeros = scales.t(), zeros if zeros is None else zeros.t()
        grid = matrix.scale_grid
        return cls(
            matrix, read(matrix.items), scales.reshape(grid), zeros if zeros is None else zeros.reshape(grid), groups
        )

    @property
    def item_zeros(self) -> Tensor | None:
        """Zero points that items are compared with, if they differ."""
        return self.zeros if self.matrix.packing.zero_means == "item" else None

    @property
    def offsets(self) -> Tensor | None:
        """What is added to the products of items and scales, if anything is."""
        return self.zeros if self.matrix.packing.zero_means == "weight" else None

    @property
    def _zero(self) -> int:
        return self.matrix.packing.zero

    def list_mistakes(self) -> Iterator[FieldViolation]:
        """What is wrong with the values of the small tensors."""
        if not self.scales.isfinite().all():
            yield FieldViolation(self.matrix.scales.name, "NaN or infinite", "finite numbers")
        if self.zeros is not None and self.matrix.zeros is not None:
            if not self.zeros.isfinite().all():
                yield FieldViolation(self.matrix.zeros.name, "NaN or infinite", "finite numbers")
            elif self.matrix.packing.zero_means == "none" and self.zeros.any():
                yield FieldViolation(self.matrix.zeros.name, "others than 0", "zeros, as quantization_config says")
        if self.groups is not None and self.matrix.groups is not None:
            first, last, count = int(self.groups.min()), int(self.groups.max()), self.scales.shape[1]
            if not 0 <= first <= last < count:
                yield FieldViolation(self.matrix.groups.name, f"{first} to {last}", f"groups from 0 to {count - 1}")

    def read_rows(self, start: int, stop: int) -> Tensor:
        """The weights of outputs `start` to `stop`, float32 [outputs, inputs]."""
        shared_outputs, shared_inputs = self.matrix.shared_scale
        values = self.read_items(start, stop).to(torch.float32)
        rows = torch.arange(start, stop) // shared_outputs
        inputs = torch.arange(self.matrix.shape[1]) // shared_inputs if self.groups is None else self.groups

        def spread(grid: Tensor) -> Tensor:
            return grid[rows] if grid.shape[1] == 1 else grid[rows][:, inputs]

        values -= self._zero if self.item_zeros is None else spread(self.item_zeros)
        values *= spread(self.scales)
        if self.offsets is not None:
            values += spread(self.offsets)
        return values

    def read_groups(self, start: int, stop: int, inputs: Tensor) -> Tensor:
        """What makes weights of the items of some inputs: a factor, and what to add; float32 [outputs, inputs, 2]."""
        shared_outputs, shared_inputs = self.matrix.shared_scale
        rows, groups = torch.arange(start, stop) // shared_outputs, inputs // shared_inputs
        factors = self.scales[rows][:, groups]
        zeros = self._zero if self.item_zeros is None else self.item_zeros[rows][:, groups]
        offsets = 0 if self.offsets is None else self.offsets[rows][:, groups]
        return torch.stack([factors, offsets - zeros * factors], -1)

    def read_items(self, start: int, stop: int) -> Tensor:
        """The items of outputs `start` to `stop` [outputs, inputs]; not negative, int32, if they share an int32."""
        packing = self.matrix.packing
        if not packing.bits:
            return self.items[start:stop]
        items, first = self.items.t() if "items" in packing.transposed else self.items, start
        if packing.packed == "outputs":
            first, last = start // packing.items_per_word, -(-stop // packing.items_per_word)
            unpacked = _split_words(items[first:last].t(), packing).t()
            first *= packing.items_per_word
            return unpacked[start - first : stop - first]
        return _split_words(items[start:stop], packing)


def _open_zeros(packing: Packing, zeros: Tensor) -> Tensor:
    """Zero points as they are compared with items; [outputs, groups], or the other way round."""
    if packing.bits and zeros.dtype == torch.int32:
        is_transposed = "scales" in packing.transposed
        outputs_last = _split_words(zeros if is_transposed else zeros.t(), packing)
        zeros = outputs_last if is_transposed else outputs_last.t()
    elif packing.zero_means == "item":
        zeros = zeros.to(torch.float32) + packing.zero
    return zeros.to(torch.float32) + packing.zero_offset


def _split_words(words: Tensor, packing: Packing) -> Tensor:
    """The items of integers [..., words], not negative, int32 [..., items]."""
    shifts = torch.tensor(packing.order or range(packing.items_per_word), dtype=torch.int32) * packing.bits
    items = (words.to(torch.int32).unsqueeze(-1) >> shifts) & ((1 << packing.bits) - 1)
    if packing.is_signed:
        items ^= 1 << (packing.bits - 1)
    return items.flatten(-2)
