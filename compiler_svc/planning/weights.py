"""Bytes of one rank's weights, by group, and of the adapters that change them.

Each linear layer of `in` inputs and `out` outputs that adapters may change has A [max_loras, in, r] and
B [max_loras, r, out]; r is the largest rank. Tensor parallelism divides one of the two together with the layer: B if it
divides the layer's outputs, A if it divides its inputs. Every rank holds the other one whole unless
`lora_shard_linear_layer` divides it, too. B of keys and values is copied as their heads are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from bundle.abi.tensor import DTYPES
from compiler_svc.config import NeuronConfig
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import Axis, Evenly, share_of
from compiler_svc.models.parameters import MemoryGroup, ParameterSpec
from compiler_svc.models.specs import LinearSpec
from compiler_svc.models.transforms import Adapters
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.weights.headers import TensorHeader

#: In the order of PlanCompile's answer.
WEIGHT_GROUPS: Final = tuple(str(group) for group in MemoryGroup)


def measure_weights(plan: WeightPlan) -> dict[str, int]:
    """Measures each group in one rank's shard, in bytes; all ranks hold the same."""
    groups = dict.fromkeys(WEIGHT_GROUPS, 0)
    for tensor in plan.tensors:
        groups[tensor.spec.group] += tensor.rank_size_bytes
    return groups


def measure_draft_weights(
    tensors: Mapping[str, TensorHeader], description: ModelDescription, *, item_bytes: int, tp_degree: int
) -> int:
    """Measures a draft model in one rank, in bytes, without the frequencies and rank numbers that are computed.

    A checkpoint that lacks tensors of a whole model, as EAGLE's do, is measured tensor by tensor: the layers as the
    description divides them; `fc`, which joins embedding and hidden state, by its outputs. Every rank holds the other
    tensors whole. EAGLE's checkpoints leave the outermost module out of names.
    """
    parameters = [one for one in description.parameters(tp_degree) if one.group is not MemoryGroup.DERIVED]
    if tensors.keys() >= description.checkpoint_tensors().keys():
        return sum(_measure(one, tp_degree, item_bytes) for one in parameters)
    specs = {name: one for one in parameters for name in (one.name, one.name.partition(".")[2])}
    specs |= {one.name: one for one in _describe_eagle_fc(tensors)}
    total = 0
    for header in tensors.values():
        spec = specs.get(header.name)
        if spec is None or spec.shape != header.shape:
            total += math.prod(header.shape) * item_bytes
        else:
            own = (spec, specs.get(f"{header.name.removesuffix('.weight')}.scale"))
            total += sum(_measure(one, tp_degree, item_bytes) for one in own if one is not None)
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
    return num_heads * sum(_measure(one, tp_degree, item_bytes) for one in parameters)


def measure_room(description: ModelDescription, config: NeuronConfig) -> int:
    """Measures the tensors of one rank's adapter slots, in bytes, as a description with room for adapters has them."""
    item_bytes = item_bytes_of(config.torch_dtype)
    return sum(_measure(one, config.tp_degree, item_bytes) for one in description.adapter_parameters())


def measure_adapters(description: ModelDescription, config: NeuronConfig, adapters: Adapters) -> int:
    """Measures the adapters that one rank of NxD Inference has room for, in bytes, as its documents count them."""
    assert config.lora_config is not None, "room for adapters has a configuration"
    items = sum(
        _count_adapter_items(linear, config.tp_degree, is_sharded=config.lora_config.lora_shard_linear_layer)
        for linear in description.linears()
        if adapters.may_change(linear, description.find_module(linear))
    )
    return adapters.slots.slots * items * adapters.slots.rank * item_bytes_of(config.torch_dtype)


def item_bytes_of(dtype: str) -> int:
    """Bytes of one item of a dtype of weights, activations or KV cache."""
    return dict(DTYPES)[dtype].size_bytes  # type: ignore[index]


def _measure(spec: ParameterSpec, tp_degree: int, item_bytes: int) -> int:
    """`item_bytes` are those of a tensor without a dtype of its own."""
    return math.prod(spec.rank_shape(tp_degree)) * (item_bytes if spec.dtype is None else item_bytes_of(spec.dtype))


def _count_adapter_items(linear: LinearSpec, tp_degree: int, *, is_sharded: bool) -> int:
    """Counts the items of A and B in one rank, for one adapter of rank 1."""
    divided, whole = linear.outputs, linear.inputs
    if linear.inputs.is_divided:
        divided, whole = whole, divided
    return divided.part_length(tp_degree) + (share_of(whole.length, tp_degree) if is_sharded else whole.length)
