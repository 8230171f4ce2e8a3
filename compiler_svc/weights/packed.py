"""The quantized matrices of a checkpoint, each in several tensors: found by headers alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bundle.abi.formats import FORMATS, GROUPS, WeightFormat
from bundle.errors import FieldViolation
from compiler_svc.models.packings import UNSAID, Packing
from compiler_svc.models.surplus import name_cache_scale
from compiler_svc.weights.headers import CASTABLE_DTYPES, TensorHeader

#: Dtypes of whole items.
_ITEMS: Final = frozenset(row.item for row in FORMATS.values())
#: What else methods write beside matrices: of activations, which stay as they are, and shapes once more.
_UNREAD: Final = frozenset(
    (
        "input_scale",
        "input_zero_point",
        "output_scale",
        "q_scale",
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
        return (shape[1], shape[0]) if "scales" in self.packing.transposed else (shape[0], shape[1])

    @property
    def kept_item(self) -> str | None:
        """The item of the rows of `FORMATS` that can be what this is; None if none can."""
        if self.packing.bits == 4 and self.groups is None:
            return "uint8" if self.kept_group else None
        has_zeros = self.zeros is not None and self.packing.zero_means != "none"
        is_kept = not self.packing.bits and not has_zeros and self.scale_grid in {(1, 1), (self.shape[0], 1)}
        return self.items.dtype if is_kept else None

    @property
    def activations(self) -> str:
        """How layers quantize what they multiply by it; see `Packing`."""
        return self.packing.activations

    def fits(self, row: WeightFormat) -> bool:
        """Whether a format can have its items and scales as they are."""
        if row.group and self.shared_scale[1] % row.group:
            return False
        return self.kept_item == row.item and (row.is_per_channel or self.scale_grid == (1, 1))

    @property
    def kept_group(self) -> int:
        """The largest groups of `GROUPS` that its scales can have as they are; 0 if none can. A scale for all inputs is
        one for any group.
        """
        is_whole = self.scale_grid[1] == 1
        return next((one for one in GROUPS if is_whole or self.shared_scale[1] % one == 0), 0)

    @property
    def _zeros_shape(self) -> tuple[int, ...]:
        rows, columns = self.scale_grid
        if self.packing.bits and self.zeros is not None and self.zeros.dtype == "int32":
            rows = -(-rows // self.packing.items_per_word)
        return (columns, rows) if "scales" in self.packing.transposed else (rows, columns)

    def list_mistakes(self) -> Iterator[FieldViolation]:
        """What is wrong with shapes and dtypes."""
        outputs, inputs = self.shape
        if self.packing.bits and self.items.dtype != self.packing.word:
            accepted = f"{self.packing.word}, with items of {self.packing.bits} bits"
            yield FieldViolation(self.items.name, f"dtype {self.items.dtype}", accepted)
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
) -> tuple[dict[str, TensorHeader], dict[str, PackedMatrix], list[FieldViolation]]:
    """Finds the quantized matrices of a checkpoint.

    Returns the headers as if they were not quantized, those of such matrices in the dtype of scales; the matrices, both
    by the name `MODULE.weight`; and what is wrong with their names, shapes and dtypes.
    """
    packed: dict[str, PackedMatrix] = {}
    mistakes = []
    for module, items in _find_items(headers, packing):
        if lacking := list(_list_lacking(headers, packing, module)):
            mistakes += lacking
            continue
        name = f"{module}.weight"
        packed[name] = _join_parts(headers, packing, module, items)
        mistakes += packed[name].list_mistakes()
        if name in headers and headers[name] is not items:
            mistakes.append(FieldViolation(name, f"one more matrix, beside {items.name}", "a matrix in one form"))
    if not packed:
        return dict(headers), {}, mistakes
    taken = {part.name for matrix in packed.values() for part in matrix.parts}
    plain = {
        name: header
        for name, header in headers.items()
        if name not in taken and (name.rpartition(".")[2] not in _UNREAD or name_cache_scale(name) is not None)
    }
    whole = {name: TensorHeader(name, one.scales.dtype, one.shape, one.items.file) for name, one in packed.items()}
    return plain | whole, packed, mistakes


def _find_items(headers: Mapping[str, TensorHeader], packing: Packing) -> Iterator[tuple[str, TensorHeader]]:
    """The tensors of items, and their modules."""
    for name, items in headers.items():
        module, _, kind = name.rpartition(".")
        if kind != packing.items or len(items.shape) != 2 or not (packing.bits or items.dtype in _ITEMS):
            continue
        # Of a checkpoint that says nothing, integers without scales may be anything.
        if packing != UNSAID or _find_scales(headers, packing, module) is not None:
            yield module, items


def _find_scales(headers: Mapping[str, TensorHeader], packing: Packing, module: str) -> TensorHeader | None:
    return next((found for one in packing.scales if (found := headers.get(f"{module}.{one}"))), None)


def _list_lacking(headers: Mapping[str, TensorHeader], packing: Packing, module: str) -> Iterator[FieldViolation]:
    kinds = packing.required if _find_scales(headers, packing, module) else (packing.scales[0], *packing.required)
    for kind in kinds:
        if f"{module}.{kind}" not in headers:
            accepted = f"a tensor that belongs to {module}.{packing.items}, as quantization_config says"
            yield FieldViolation(f"{module}.{kind}", "missing", accepted)


def _join_parts(
    headers: Mapping[str, TensorHeader], packing: Packing, module: str, items: TensorHeader
) -> PackedMatrix:
    scales = _find_scales(headers, packing, module)
    assert scales is not None, "a matrix that lacks something is a mistake"
    shape = list(items.shape[::-1] if "items" in packing.transposed else items.shape)
    if packing.bits:
        shape[packing.packed == "inputs"] *= packing.items_per_word
    zeros, groups = (headers.get(f"{module}.{one}") for one in (packing.zeros, packing.groups))
    return PackedMatrix(packing, (shape[0], shape[1]), items, scales, zeros, groups)
