"""The values of a GGUF file's tensors, some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.gguf.dequant import dequantize

from compiler_svc.weights.gguf.model import GROUP, GgufTensor


def map_file(file: Path) -> Tensor:
    """Maps a file into memory, uint8 [bytes]. It is for reading alone."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


def read_floats(tensor: GgufTensor, data: Tensor) -> Tensor:
    """The values of a tensor of floats, in their dtype; `data` is the mapped file."""
    rows = _view(tensor, data).view(getattr(torch, tensor.type.dtype)).view(tensor.shape)
    if tensor.heads:
        rows = rows[_find_rows(tensor, 0, tensor.shape[0])]
    return rows - tensor.offset if tensor.offset else rows


@dataclass(frozen=True, slots=True, eq=False)
class OpenedBlocks:
    """An opened matrix of blocks; `data` is the mapped file."""

    matrix: GgufTensor
    data: Tensor

    @property
    def items(self) -> Tensor:
        """All items of a matrix of four bits [outputs, inputs]."""
        return self.read_items(0, self.matrix.shape[0])

    @property
    def scales(self) -> Tensor:
        """The factors of all groups of a matrix of four bits, float32 [outputs, groups]."""
        return self._read_pairs(0, self.matrix.shape[0])[..., 0]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """The weights of outputs `start` to `stop`, float32 [outputs, inputs]."""
        values: Tensor = dequantize(self._read_blocks(start, stop), self.matrix.stored.number)
        return values.view(stop - start, self.matrix.shape[1])

    def read_items(self, start: int, stop: int) -> Tensor:
        """The numbers from 0 to 15 of outputs `start` to `stop`, uint8 [outputs, inputs]."""
        kind = self.matrix.type
        # They are last, half as many bytes.
        packed = self._read_blocks(start, stop).view(-1, kind.size_bytes)[:, -kind.items // 2 :]
        # Of 64 neighbours, or of a block, the low bits have the first half.
        packed = packed.reshape(-1, min(kind.items, 64) // 2)
        return torch.cat([packed & 15, packed >> 4], 1).view(stop - start, -1)

    def read_groups(self, start: int, stop: int, inputs: Tensor) -> Tensor:
        """What makes weights of the items of some inputs: a factor, and what to add; float32 [outputs, inputs, 2]."""
        return self._read_pairs(start, stop)[:, inputs // GROUP]

    def _read_pairs(self, start: int, stop: int) -> Tensor:
        """Factors and offsets, float32 [outputs, groups, 2]: the weights of blocks whose items are all 1 or all 0."""
        kind = self.matrix.type
        blocks = self._read_blocks(start, stop).view(-1, kind.size_bytes)
        ends = []
        for items in (0x00, 0x11):
            filled = blocks.clone()
            filled[:, -kind.items // 2 :] = items
            values: Tensor = dequantize(filled.flatten(), self.matrix.stored.number)
            ends.append(values.view(stop - start, -1, GROUP)[..., 0])
        offset, one = ends
        return torch.stack([one - offset, offset], -1)

    def _read_blocks(self, start: int, stop: int) -> Tensor:
        """Bytes of some outputs, uint8 [outputs, bytes]."""
        rows = _view(self.matrix, self.data).view(self.matrix.shape[0], -1)
        if self.matrix.heads:
            return rows[_find_rows(self.matrix, start, stop)]
        # Blocks begin anywhere, and halves of them are read as numbers of two bytes.
        return rows[start:stop].clone()


def _view(tensor: GgufTensor, data: Tensor) -> Tensor:
    start_byte = tensor.stored.start_byte
    return data[start_byte : start_byte + tensor.stored.size_bytes]


def _find_rows(tensor: GgufTensor, start: int, stop: int) -> Tensor:
    """Where the file has rows: it has the halves of a head, which transformers turns together, by turns."""
    size = tensor.shape[0] // tensor.heads
    rows = torch.arange(start, stop)
    half, number = (rows % size) // (size // 2), rows % (size // 2)
    return rows - rows % size + 2 * number + half
