"""The quantized matrices of a checkpoint, each in several tensors: found by headers alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bundle.abi.formats import FORMATS, GROUPS, WeightFormat
from bundle.errors import FieldViolation
from compiler_svc.models.packings import Packing
from compiler_svc.weights.headers import CASTABLE_DTYPES, TensorHeader

#: Dtypes of items that do not share an int32.
_ITEMS: Final = frozenset(row.item for row in FORMATS.values())
#: What else methods write beside matrices: of activations and caches, which stay as they are, and shapes once more.
_UNREAD: Final = frozenset(
    (
        "input_scale",
        "input_zero_point",
        "output_scale",
        "q_scale",
        "k_scale",
        "v_scale",
        "kv_scale",
        "weight_shape",
        "g_idx",
    )
)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outputs, inputs] of a checkpoint that is quantized, and the tensors that make it up."""

    packing: Packing
    shape: tuple[int, int]
    items: TensorHeader
    scales: TensorHeader
    zeros: TensorHeader | None
    groups: TensorHeader | None

    @property
    def parts(self) -> list[TensorHeader]:
        """The tensors."""
        return [one for one in (self.items, self.scales, self.zeros, self.groups) if one is not None]

    @property
    def shared_scale(self) -> tuple[int, int]:
        """How many outputs and inputs share a scale."""
        if self.packing.block:
            return self.packing.block
        outputs, inputs = self.shape
        rows, columns = self.scale_grid
        return outputs // rows, inputs // columns

    @property
    def scale_grid(self) -> tuple[int, int]:
        """Scales along outputs and along inputs, as the tensor has them."""
        shape = self.scales.shape
        if len(shape) < 2:
            return (shape[0] if shape else 1), 1
        return (shape[1], shape[0]) if self.packing.is_transposed else (shape[0], shape[1])

    @property
    def kept_item(self) -> str | None:
        """The item of the rows of `FORMATS` that can be what this is; None if none can."""
        if self.packing.bits == 4 and self.groups is None:
            return "uint8" if self.scale_grid[1] == 1 or self.shared_scale[1] % GROUPS[0] == 0 else None
        is_kept = not self.packing.bits and self.zeros is None and self.scale_grid in {(1, 1), (self.shape[0], 1)}
        return self.items.dtype if is_kept else None

    def fits(self, row: WeightFormat) -> bool:
        """Whether a format can have its items and scales as they are."""
        return self.kept_item == row.item and (row.is_per_channel or self.scale_grid == (1, 1))

    @property
    def _zeros_shape(self) -> tuple[int, ...]:
        rows, columns = self.scale_grid
        if self.packing.bits and self.zeros is not None and self.zeros.dtype == "int32":
            rows = -(-rows // self.packing.items_per_word)
        return (columns, rows) if self.packing.is_transposed else (rows, columns)

    def list_mistakes(self) -> Iterator[FieldViolation]:
        """What is wrong with shapes and dtypes."""
        outputs, inputs = self.shape
        if self.packing.bits and self.items.dtype != "int32":
            yield FieldViolation(self.items.name, f"dtype {self.items.dtype}", "int32, which several items share")
        rows, columns = self.packing.block or (1, 1)
        grid = self.scale_grid
        if self.packing.block:
            fits = grid == (-(-outputs // rows), -(-inputs // columns))
        else:
            fits = grid[0] in {1, outputs} and grid[1] > 0 and inputs % grid[1] == 0
        if not fits or len(self.scales.shape) > 2 or 0 in self.shape:
            accepted = f"scales of {outputs} outputs and {inputs} inputs"
            accepted += (
                f", one for each {rows} x {columns}" if self.packing.block else ", or of groups that divide them"
            )
            yield FieldViolation(self.scales.name, f"shape {list(self.scales.shape)}", accepted)
        if self.scales.dtype not in CASTABLE_DTYPES:
            accepted = f"one of {', '.join(CASTABLE_DTYPES)}"
            yield FieldViolation(self.scales.name, f"dtype {self.scales.dtype}", accepted)
        if self.zeros is not None and self.zeros.shape != self._zeros_shape:
            shape = list(self._zeros_shape)
            yield FieldViolation(self.zeros.name, f"shape {list(self.zeros.shape)}", f"shape {shape}, as of scales")
        if self.groups is not None and self.groups.shape != (inputs,):
            yield FieldViolation(self.groups.name, f"shape {list(self.groups.shape)}", f"shape [{inputs}]")


def find_packed(
    headers: Mapping[str, TensorHeader], packing: Packing
) -> tuple[dict[str, TensorHeader], dict[str, PackedMatrix]]:
    """Finds the quantized matrices of a checkpoint.

    Returns the headers as if they were not quantized, those of such matrices in the dtype of scales, and the matrices,
    both by the name `MODULE.weight`.
    """
    packed = dict(_find_matrices(headers, packing))
    if not packed:
        return dict(headers), {}
    taken = {part.name for matrix in packed.values() for part in matrix.parts}
    plain = {
        name: header for name, header in headers.items() if name not in taken and name.rpartition(".")[2] not in _UNREAD
    }
    whole = {name: TensorHeader(name, one.scales.dtype, one.shape, one.items.file) for name, one in packed.items()}
    return plain | whole, packed


def _find_matrices(headers: Mapping[str, TensorHeader], packing: Packing) -> Iterator[tuple[str, PackedMatrix]]:
    for name, items in headers.items():
        module, _, kind = name.rpartition(".")
        if kind != packing.items or len(items.shape) != 2:
            continue
        scales = next((found for one in packing.scales if (found := headers.get(f"{module}.{one}"))), None)
        if scales is None or not (packing.bits or items.dtype in _ITEMS):
            continue
        shape = list(items.shape[::-1] if packing.is_transposed else items.shape)
        if packing.bits:
            shape[packing.packed == "inputs"] *= packing.items_per_word
        zeros, groups = (headers.get(f"{module}.{one}") for one in (packing.zeros, packing.groups))
        yield f"{module}.weight", PackedMatrix(packing, (shape[0], shape[1]), items, scales, zeros, groups)
