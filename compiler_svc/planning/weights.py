"""Bytes of one rank's weights, by group, and of the adapters that change them.

A quantized matrix keeps one byte for each value and float32 scales: one for each output, or one for the matrix.

Each linear layer of `in` inputs and `out` outputs that adapters may change has A [max_loras, in, r] and
B [max_loras, r, out]; r is the largest rank. Tensor parallelism divides one of the two together with the layer: B if it
divides the layer's outputs, A if it divides its inputs. Every rank holds the other one whole unless
`lora_shard_linear_layer` divides it, too. B of keys and values is copied as their heads are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from bundle.manifest import DTYPE_SIZES_BYTES
from compiler_svc.config import NeuronConfig
from compiler_svc.models.description import LinearSpec, ModelDescription
from compiler_svc.models.divisions import Axis, Evenly, share_of
from compiler_svc.models.parameters import MemoryGroup, ParameterSpec, WeightFormat
from compiler_svc.models.transforms import quantize
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.weights.headers import TensorHeader

#: In the order of PlanCompile's answer.
WEIGHT_GROUPS: Final = tuple(str(group) for group in MemoryGroup)

#: Stands for every linear layer that adapters may change.
ALL_LINEAR: Final = "all-linear"

_SCALE_BYTES: Final = 4
#: Every dtype of quantized weights has items of this size.
_QUANTIZED_ITEM_BYTES: Final = 1


def quantize_as_configured(
    description: ModelDescription, config: NeuronConfig, skipped: Iterable[str]
) -> ModelDescription:
    """Puts the description's matrices into the format that a configuration asks for.

    The kernel of `quantized_mlp_kernel_enabled` takes quantized matrices of the MLP, whether `quantized` is set or not.

    Args:
        skipped: Parts of the names of modules that stay as they are.
    """
    if not (config.quantized or config.quantized_mlp_kernel_enabled):
        return description
    is_per_channel = config.quantization_type == "per_channel_symmetric"
    return quantize(
        description,
        WeightFormat.PER_CHANNEL if is_per_channel else WeightFormat.PER_TENSOR,
        tuple(skipped),
        groups=tuple(MemoryGroup) if config.quantized else (MemoryGroup.MLP,),
    )


def measure_weights(plan: WeightPlan) -> dict[str, int]:
    """Measures each group in one rank's shard, in bytes; all ranks hold the same."""
    groups = dict.fromkeys(WEIGHT_GROUPS, 0)
    for tensor in plan.tensors:
        groups[tensor.spec.group] += _measure(tensor.spec, tensor.rank_shape, DTYPE_SIZES_BYTES[tensor.dtype])
    return groups


def measure_draft_weights(
    tensors: Mapping[str, TensorHeader], description: ModelDescription, *, item_bytes: int, tp_degree: int
) -> int:
    """Measures a draft model in one rank, in bytes, without the frequencies and rank numbers that are computed.

    A checkpoint that lacks tensors of a whole model, as EAGLE's do, is measured tensor by tensor: the layers as the
    description divides them; `fc`, which joins embedding and hidden state, by its outputs. Every rank holds the other
    tensors whole.

    Args:
        tensors: The checkpoint's, by name; EAGLE's checkpoints leave the outermost module out of names.
    """
    parameters = [one for one in description.parameters(tp_degree) if one.group is not MemoryGroup.DERIVED]
    if tensors.keys() >= description.checkpoint_tensors().keys():
        return sum(_measure(one, one.rank_shape(tp_degree), item_bytes) for one in parameters)
    specs = {name: one for one in parameters for name in (one.name, one.name.partition(".")[2])}
    specs |= {one.name: one for one in _describe_eagle_fc(tensors)}
    total = 0
    for header in tensors.values():
        spec = specs.get(header.name)
        if spec is None or spec.shape != header.shape:
            total += math.prod(header.shape) * item_bytes
        else:
            total += _measure(spec, spec.rank_shape(tp_degree), item_bytes)
    return total


def _describe_eagle_fc(tensors: Mapping[str, TensorHeader]) -> Iterator[ParameterSpec]:
    weight = tensors.get("fc.weight")
    if weight is not None and len(weight.shape) == 2:
        outputs, inputs = weight.shape
        yield from LinearSpec(
            name="fc", inputs=Axis(inputs), outputs=Axis(outputs, Evenly()), has_bias=True, group=MemoryGroup.DRAFT
        ).parameters()


def measure_medusa_heads(description: ModelDescription, num_heads: int, *, item_bytes: int, tp_degree: int) -> int:
    """Measures Medusa heads in one rank, in bytes: each has a whole residual layer and a divided vocabulary head."""
    hidden = Axis(description.hidden_size)
    layers = (
        LinearSpec(name="residual", inputs=hidden, outputs=hidden, has_bias=True, group=MemoryGroup.DRAFT),
        LinearSpec(name="head", inputs=hidden, outputs=Axis(description.vocab_size, Evenly()), group=MemoryGroup.DRAFT),
    )
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return num_heads * sum(_measure(one, one.rank_shape(tp_degree), item_bytes) for one in parameters)


def measure_adapters(
    description: ModelDescription, config: NeuronConfig, *, num_adapters: int = 0, largest_rank: int = 0
) -> int:
    """Measures the adapters that one rank has room for, in bytes; 0 if the configuration serves none.

    Without `target_modules`, counts every linear layer that adapters may change.

    Args:
        num_adapters: Number of adapters whose files are there, which raises `max_loras` as in NxD Inference.
        largest_rank: Their largest rank, which raises `max_lora_rank`.
    """
    lora = config.lora_config
    if lora is None:
        return 0
    targets = frozenset(lora.target_modules)
    items = sum(
        _count_adapter_items(linear, config.tp_degree, is_sharded=lora.lora_shard_linear_layer)
        for linear in description.linears()
        if is_adapted(linear, targets)
    )
    num_adapters, largest_rank = max(lora.max_loras, num_adapters), max(lora.max_lora_rank, largest_rank)
    return num_adapters * items * largest_rank * item_bytes_of(config.torch_dtype)


def is_adapted(linear: LinearSpec, targets: Collection[str]) -> bool:
    """Whether adapters change a linear layer.

    Args:
        targets: Names of modules, whole or their last part, or `ALL_LINEAR`; empty for all that adapters may change.
    """
    return linear.is_adaptable and (
        not targets or ALL_LINEAR in targets or linear.module in targets or linear.name in targets
    )


def item_bytes_of(dtype: str) -> int:
    """Bytes of one item of a dtype of weights, activations or KV cache."""
    return dict(DTYPE_SIZES_BYTES)[dtype]  # type: ignore[index]


def _measure(spec: ParameterSpec, rank_shape: tuple[int, ...], item_bytes: int) -> int:
    items = math.prod(rank_shape)
    if spec.format is WeightFormat.DENSE:
        return items * item_bytes
    num_scales = rank_shape[0] if spec.format is WeightFormat.PER_CHANNEL else 1
    return items * _QUANTIZED_ITEM_BYTES + num_scales * _SCALE_BYTES


def _count_adapter_items(linear: LinearSpec, tp_degree: int, *, is_sharded: bool) -> int:
    """Counts the items of A and B in one rank, for one adapter of rank 1."""
    divided, whole = linear.outputs, linear.inputs
    if linear.inputs.is_divided:
        divided, whole = whole, divided
    return divided.part_length(tp_degree) + (share_of(whole.length, tp_degree) if is_sharded else whole.length)
