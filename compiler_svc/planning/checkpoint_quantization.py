"""What a checkpoint that is quantized already makes of a compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bundle.abi.formats import FORMATS, GROUPS
from bundle.manifest import TargetKind
from compiler_svc.config import NeuronConfig
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.transforms import INT4
from compiler_svc.planning.build_plan import choose_changes, may_misread
from compiler_svc.sharding.plan import find_matrices
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.gguf.model import GgufTensor
from compiler_svc.weights.packed import PackedMatrix
from targets.cpu import CPU

_PER_CHANNEL: Final = "_per_channel"
_FLOAT8: Final = "f8e4m3"
#: `activation_quantization_type` of checkpoints that quantize each token by itself.
_FOLLOWED: Final = "dynamic_whole"
#: `quantization_dtype` by the dtype of items.
_WORDS: Final[Mapping[str | None, str]] = {
    row.item: INT4 if row.group else name.removesuffix(_PER_CHANNEL)
    for name, row in FORMATS.items()
    if row.is_per_channel
}


def read_quantization(checkpoint: Checkpoint, target: TargetKind) -> dict[str, Any]:
    """What `neuron_config` says of quantization unless a document does: what the checkpoint is.

    Items that the target does not have, such as those of two bits, become int8.
    """
    # Tables of embeddings become floats, so that their bits say nothing.
    matrices = _find_packed(checkpoint, checkpoint.description).values()
    if not matrices:
        return {}
    kept = {None if _is_foreign(matrix, target) else matrix.kept_item for matrix in matrices}
    word = _WORDS.get(kept.pop(), "int8") if len(kept) == 1 else "int8"
    if word == INT4 and (group := min(matrix.kept_group for matrix in matrices)) != GROUPS[0]:
        word = f"{INT4}_by_{group}"
    follows = target == CPU.kind and _find_activations(checkpoint) == ("float" if word == _FLOAT8 else "int")
    return {
        "quantized": True,
        "quantization_dtype": word,
        "quantization_type": f"{_PER_CHANNEL[1:]}_symmetric",
        "modules_to_not_convert": tuple(list_plain(checkpoint)),
        **({"activation_quantization_type": _FOLLOWED} if follows else {}),
    }


def _find_activations(checkpoint: Checkpoint) -> str:
    """How the checkpoint's layers quantize what they multiply; see `Packing`."""
    return next((matrix.activations for matrix in checkpoint.packed.values()), "")


def note_activations(checkpoint: Checkpoint, config: NeuronConfig) -> Iterator[str]:
    """Says what becomes of activations if a checkpoint, or a configuration in vain, asks for bytes."""
    said, is_quantized = config.activation_quantization_type, config.quantized or config.quantized_mlp_kernel_enabled
    if said not in (None, "none") and not is_quantized:
        yield "neuron_config.activation_quantization_type: it is ignored because quantized is false"
    elif _find_activations(checkpoint) and said == _FOLLOWED:
        yield (
            "model: activations are quantized, as its quantization_config says; with "
            "neuron_config.activation_quantization_type 'none' they are not"
        )
    elif _find_activations(checkpoint) and said in (None, "none"):
        yield "model: activations are not quantized, although its quantization_config says that they may be"


def _find_packed(checkpoint: Checkpoint, description: ModelDescription) -> dict[str, PackedMatrix | GgufTensor]:
    """The quantized matrices of linear layers."""
    if not checkpoint.packed:
        return {}
    names = {name for _, names in find_matrices(description, checkpoint) for name in names}
    return {name: one for name, one in checkpoint.packed.items() if name in names}


def _is_foreign(matrix: PackedMatrix | GgufTensor, target: TargetKind) -> bool:
    """Whether only other targets have the items; no cores have four bits in groups."""
    return may_misread(matrix, target) or (matrix.kept_item == "uint8" and target != CPU.kind)


def list_plain(checkpoint: Checkpoint) -> list[str]:
    """Names of the linear layers whose matrices the checkpoint has not quantized."""
    matrices = find_matrices(checkpoint.description, checkpoint)
    return [one.name for one, names in matrices if not names or not checkpoint.packed.keys() >= set(names)]


def warn_of_other_bits(checkpoint: Checkpoint, config: NeuronConfig) -> tuple[str, ...]:
    """Warns if matrices that the checkpoint has quantized do not stay as they are."""
    if not checkpoint.packed:
        return ()
    description = choose_changes(config).apply(checkpoint.description)
    matrices = _find_packed(checkpoint, description)
    count, tables = len(matrices), len(checkpoint.packed) - len(matrices)
    formats = {name: one.format for one, names in find_matrices(description, checkpoint) for name in names}
    dense = sum(not formats.get(name) for name in matrices)
    lost = Counter(
        formats[name]
        for name, matrix in matrices.items()
        if formats.get(name) and not matrix.fits(FORMATS[formats[name]])
    )
    kept_small = "neuron_config.quantized keeps them small"
    return (
        *([f"model: {dense} of {count} quantized matrices become {config.torch_dtype}; {kept_small}"] if dense else []),
        *(
            f"model: {number} of {count} quantized matrices become {name}, and lose by it"
            for name, number in lost.items()
        ),
        *([f"model: {tables} quantized tables become {config.torch_dtype}, as all embeddings"] if tables else []),
    )
