"""The plan of a quantized checkpoint: what becomes of each tensor of a plain one, and which file holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from bundle.abi.formats import FORMATS
from bundle.abi.tensor import DTYPES, DType
from compiler_svc.models.divisions import Axis
from compiler_svc.models.parameters import MemoryGroup, ParameterSpec
from compiler_svc.models.sources import ITEMS_PER_WORD, Compressed, CompressedPart, Sliced, Source, Stored
from compiler_svc.models.transforms import Quantization, quantize
from compiler_svc.sharding.checkpoint_layouts import LAYOUTS, Scheme, describe
from compiler_svc.sharding.errors import CheckpointQuantized, NothingToQuantize
from compiler_svc.sharding.plan import PlannedTensor, WeightPlan, find_matrices
from compiler_svc.weights.checkpoint import SAFETENSORS_FILE, Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid, join_names, split_number
from compiler_svc.weights.headers import TensorHeader
from compiler_svc.weights.inventory import take_inventory

#: Bytes of a file; one with a larger tensor has more. What is lost of a run that ends is at most a file.
MAX_FILE_BYTES: Final = 4 << 30
INDEX_FILE: Final = f"{SAFETENSORS_FILE}.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """The files of weights, by name, what `config.json` gains, and the linear layers that stay as they are."""

    files: Mapping[str, WeightPlan]
    config: Mapping[str, Any]
    plain: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.shard_size_bytes for file in self.files.values())

    @property
    def index(self) -> dict[str, Any] | None:
        """The index of several files; None of a single one."""
        if len(self.files) == 1:
            return None
        placed = {tensor.name: name for name, file in self.files.items() for tensor in file.tensors}
        return {"metadata": {"total_size": self.size_bytes}, "weight_map": dict(sorted(placed.items()))}


def plan_checkpoint(
    checkpoint: Checkpoint,
    dtype: str,
    layout: str,
    skipped: Sequence[str] = (),
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> CheckpointPlan:
    """Plans a quantized checkpoint from the headers of a plain one, for a dtype that the layout has.

    Embeddings stay as they are, a head that shares the table, and layers that have a part of `skipped` in their names.
    """
    if checkpoint.is_gguf:
        accepted = "the model's checkpoint in a directory"
        raise CheckpointInvalid(checkpoint.path, "model", "a GGUF file", accepted)
    if checkpoint.packed:
        raise CheckpointQuantized(checkpoint.path.name)
    inventory = take_inventory(checkpoint.description, checkpoint)
    if inventory.mistakes:
        raise CheckpointInvalid.listing(checkpoint.path, inventory.mistakes)
    scheme = LAYOUTS[layout].schemes[dtype]
    choices = _choose(checkpoint, scheme.format, skipped, takes_head=LAYOUTS[layout].takes_head)
    if not any(choices.values()):
        raise NothingToQuantize(checkpoint.path.name, dtype)
    tensors: list[PlannedTensor] = []
    for header in checkpoint.tensors.values():
        tensors += _quantize(header, scheme) if choices.get(header.name) else [_keep(header, checkpoint)]
    plain = tuple(name.removesuffix(".weight") for name, is_quantized in choices.items() if not is_quantized)
    parts = checkpoint.description.left_out
    left_out = [part for part in parts if any(name.startswith(f"{part}.") for name in checkpoint.tensors)]
    return CheckpointPlan(
        files=_divide(tensors, max_file_bytes), config=dict(describe(scheme, plain, left_out)), plain=plain
    )


def warn_of_plain(plain: Sequence[str]) -> tuple[str, ...]:
    """Names the linear layers that stay as they are."""
    return (f"model: not quantized: {', '.join(_join_names(plain))}",) if plain else ()


def _join_names(names: Sequence[str]) -> Iterator[str]:
    """Those that differ in the layer only as one: `layers.{0-31}.mlp`."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        alike.setdefault(split_number(name), []).append(name)
    return map(join_names, alike.values())


def _choose(checkpoint: Checkpoint, format_name: str, skipped: Sequence[str], *, takes_head: bool) -> dict[str, bool]:
    """Whether each matrix of linear layers is quantized, by the checkpoint's names: if all layers are that it is of.

    Scales are of outputs, so a matrix that several layers share has those that each of them would have.
    """
    description = checkpoint.description
    storage, group = description.storage, FORMATS[format_name].group or 1
    changed = quantize(description, Quantization(format=format_name, skipped=tuple(skipped)))
    choices: dict[str, bool] = {}
    for (linear, names), other in zip(find_matrices(description, checkpoint), changed.linears(), strict=True):
        is_head = linear is description.head
        is_lying = storage.is_transposed and not is_head
        takes = bool(other.format and names) and not is_lying and linear.inputs.length % group == 0
        for name in names or [storage.find_name(f"{linear.name}.weight")]:
            choices[name] = choices.get(name, True) and takes and (takes_head or not is_head)
    return choices


def _quantize(header: TensorHeader, scheme: Scheme) -> Iterator[PlannedTensor]:
    """The tensors in place of a matrix."""
    row, module, (outputs, inputs) = FORMATS[scheme.format], header.name.removesuffix("weight"), header.shape
    words, groups = -(-outputs // ITEMS_PER_WORD), inputs // (row.group or inputs)
    items: tuple[DType, tuple[int, ...]] = row.item, (outputs, inputs)
    forms: dict[CompressedPart, tuple[DType, tuple[int, ...]]] = {
        "items": ("int32", (outputs, inputs // ITEMS_PER_WORD)) if row.group else items,
        "scales": ("float32", (outputs, groups)),
        "zeros": ("int32", (words, groups)),
        "shape": ("int32", (2,)),
    }
    for suffix, part in scheme.parts.items():
        dtype, shape = forms[part]
        matrix = Sliced(Stored(header.name), 0, outputs)
        yield _plan(f"{module}{suffix}", dtype, shape, Compressed(matrix, (outputs, inputs), scheme.format, part))


def _keep(header: TensorHeader, checkpoint: Checkpoint) -> PlannedTensor:
    dtype = "float32" if header.dtype == "float64" else header.dtype
    if dtype not in DTYPES or 0 in (header.shape or (0,)):
        value, accepted = f"dtype {header.dtype}, shape {list(header.shape)}", f"items of {', '.join(DTYPES)}"
        raise CheckpointInvalid(checkpoint.path, header.name, value, accepted)
    return _plan(header.name, cast("DType", dtype), header.shape, Stored(header.name))


def _plan(name: str, dtype: DType, shape: tuple[int, ...], source: Source) -> PlannedTensor:
    """A tensor of a file that no rank shares; `DERIVED`, as a group of memory, means nothing here."""
    axes = tuple(map(Axis, shape))
    spec = ParameterSpec(name=name, axes=axes, source=source, group=MemoryGroup.DERIVED, dtype=dtype)
    return PlannedTensor(spec, dtype, tp_degree=1)


def _divide(tensors: Sequence[PlannedTensor], max_file_bytes: int) -> dict[str, WeightPlan]:
    """Files of neighbouring tensors, named as transformers names them. Large items come first, so all are aligned."""
    files: list[list[PlannedTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if files[-1] and size_bytes + tensor.rank_size_bytes > max_file_bytes:
            files.append([])
            size_bytes = 0
        files[-1].append(tensor)
        size_bytes += tensor.rank_size_bytes
    stem, _, suffix = SAFETENSORS_FILE.rpartition(".")
    numbered = (f"{stem}-{number:05}-of-{len(files):05}.{suffix}" for number in range(1, len(files) + 1))
    names = [SAFETENSORS_FILE] if len(files) == 1 else numbered
    return {
        name: WeightPlan(1, tuple(sorted(file, key=lambda one: -DTYPES[one.dtype].size_bytes)))
        for name, file in zip(names, files, strict=True)
    }
