"""`kiln::linear`: multiplies rows of activations by weights, quantized or not, with a kernel of our own. Decoding is
bound by the speed of reading weights: Inductor's matrix products read them at a fraction of the memory's bandwidth. See
kernels/linear.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node
from torch.nn import functional

from compiler_svc.lower.common_objects import compile_once, read_kernel
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.kernel_calls import declare, join_pointers, join_sizes, lay_out, make_contiguous, point
from execution.quantized_linear import multiply_quantized

#: Dtype of the activations, and of the weights or of their items.
DtypePair = tuple[torch.dtype, torch.dtype]

#: Types of the kernel's template, by dtype.
TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "kiln::BFloat16",
    torch.float16: "kiln::Float16",
    torch.int8: "kiln::Int8",
    torch.uint8: "kiln::Int4",
    torch.float8_e4m3fn: "kiln::Float8E4M3",
    torch.float8_e5m2: "kiln::Float8E5M2",
}
#: Dtypes of layers that are not quantized which the kernel serves, whatever the instruction set and the number of rows;
#: ATen multiplies others. `bench.kernels` measures both. ATen would have to be faster by more than `ATENS_LEAD`: the
#: kernel skips rows that are not live, and what it chooses by the number of rows follows the live ones.
DENSE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
ATENS_LEAD: Final = 0.05
#: What `kiln::linear` replaces, each with what its third argument is.
_TARGETS: Final[Mapping[Any, str]] = {
    torch.ops.aten.linear.default: "bias",
    torch.ops.kiln.quantized_linear.default: "scales",
}


@torch.library.custom_op("kiln::linear", mutates_args=())
def linear(
    activations: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    live_rows: Tensor | None = None,  # noqa: ARG001 - a hint, which this reference does without
) -> Tensor:
    """Computes `functional.linear` with several weights at once, or `kiln::quantized_linear`.

    A row's results depend on the row and the weights alone: not on other rows or the number of threads. Its last bits
    depend on whether 128 rows are live, because compiled code adds in another order then, and on no other number. In
    bfloat16 for `x86-64-v4-amx`, where weights are not quantized, they depend on no number.

    Compiled code rounds each row to 16 bits where weights are int8 or int4, by a unit of 1/16384 to 1/32768 of its
    largest magnitude; unless tiles multiply, all results of a row with NaN or an infinity are NaN then.

    Args:
        activations: [..., inputs], of one of `DENSE_DTYPES`.
        weights: Each [outputs of this weight, inputs], of the same dtype, or items of one of `bundle.abi.formats`.
        scales: Of each quantized weight, float32 [outputs of this weight] or [1], or [outputs, 2 groups]; none if
            weights are not quantized.
        live_rows: int32 [groups]; None if all rows are live. The rows of activations, numbered through all their
            dimensions, are so many groups of equal size; of each group, only that many leading rows are live. So
            [1] counts leading rows, and [R] counts the leading tokens of each row of [R, T, inputs].

    Returns:
        [..., sum of outputs]: the results side by side. Compiled code leaves those of rows that are not live unwritten,
        and spends no time on them.
    """
    if scales:
        pairs = zip(weights, scales, strict=True)
        return torch.cat([multiply_quantized(activations, items, scale) for items, scale in pairs], -1)
    return torch.cat([functional.linear(activations, weight) for weight in weights], -1)


@linear.register_fake
def _(
    activations: Tensor, weights: Sequence[Tensor], _scales: Sequence[Tensor], _live_rows: Tensor | None = None
) -> Tensor:
    return activations.new_empty((*activations.shape[:-1], sum(weight.shape[0] for weight in weights)))


def use_linear_kernel(module: GraphModule, live_rows: Mapping[int, Node] = MappingProxyType({})) -> set[DtypePair]:
    """Replaces linear layers in a graph by `kiln::linear`; layers with the same input and dtypes share one call.

    Keeps layers whose weight the graph computes, and layers in other dtypes. Returns the dtypes of all calls.

    Args:
        live_rows: Tensors of the graph that say which rows are live, as `kiln::linear` takes them, by the number of
            rows of the activations that they are for; such as [1] by the number of sequences, and [sequences] by the
            number of their tokens. They must come before the layers.
    """
    groups: dict[tuple[Node, DtypePair], list[_Layer]] = {}
    for target in _TARGETS:
        for node in module.graph.find_nodes(op="call_function", target=target):
            layer = _Layer.of(node)
            if layer.is_served:
                groups.setdefault((layer.activations, layer.dtypes), []).append(layer)
    for layers in groups.values():
        # The input may have been a layer that this loop has replaced.
        activations = _Layer.of(layers[0].node).activations
        live = live_rows.get(activations.meta["val"].shape[:-1].numel())
        _join(module.graph, activations, layers, live)
    module.graph.lint()
    module.recompile()
    return {dtypes for _, dtypes in groups}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer in a graph: a call of one of `_TARGETS`."""

    node: Node
    activations: Node
    weight: Node
    bias: Node | None = None
    scales: Node | None = None

    @classmethod
    def of(cls, node: Node) -> Self:
        last: Any = node.args[2] if len(node.args) > 2 else None
        named = {_TARGETS[node.target]: last}
        return cls(node, *node.args[:2], **named)  # type: ignore[arg-type]

    @property
    def dtypes(self) -> DtypePair:
        return self.activations.meta["val"].dtype, self.weight.meta["val"].dtype

    @property
    def outputs(self) -> int:
        outputs: int = self.weight.meta["val"].shape[0]
        return outputs

    @property
    def is_served(self) -> bool:
        if self.weight.op not in {"get_attr", "placeholder"}:
            return False
        dtype, own = self.dtypes
        return self.scales is not None or (dtype == own and dtype in DENSE_DTYPES)


def _join(graph: torch.fx.Graph, activations: Node, layers: Sequence[_Layer], live_rows: Node | None) -> None:
    with graph.inserting_before(layers[0].node):
        weights = [layer.weight for layer in layers]
        scales = [layer.scales for layer in layers if layer.scales is not None]
        joined = graph.call_function(torch.ops.kiln.linear.default, (activations, weights, scales, live_rows))
    first = 0
    for layer in layers:
        with graph.inserting_before(layer.node):
            result = graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, first, first + layer.outputs))
            if layer.bias is not None:
                result = graph.call_function(torch.ops.aten.add.Tensor, (result, layer.bias))
        first += layer.outputs
        result.meta["val"] = layer.node.meta["val"]
        layer.node.replace_all_uses_with(result)
        graph.erase_node(layer.node)


def compile_linear_kernel(job: LoweringJob, pair: DtypePair) -> Path:
    """Compiles the object that libraries with calls of `kiln::linear` in a pair of dtypes link with. Valid inside
    `steered`.
    """
    return compile_once(job, name_function(*pair), write_kernel_source([pair]))


def compile_linear_kernels(job: LoweringJob) -> None:
    """Does the same for the dtypes of most models, whose weights are not quantized."""
    for dtype in (torch.float32, torch.bfloat16):
        compile_linear_kernel(job, (dtype, dtype))


def write_kernel_source(pairs: Iterable[DtypePair]) -> str:
    """Returns the kernel's source as one text, with one function for each pair of dtypes."""
    entries = [
        f'extern "C" void {_entry(pair)} {{\n'
        f"  kiln::multiply<{', '.join(TYPES[dtype] for dtype in pair)}>(\n"
        f"      out, activations, weights, scales, num_scales, outputs, count, rows, inputs, live, groups);\n}}\n"
        for pair in pairs
    ]
    return "".join([read_kernel("linear.cpp"), *entries])


def name_function(activations: torch.dtype, weights: torch.dtype) -> str:
    """Names the kernel's function for a pair of dtypes."""
    names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (activations, weights))
    return "_".join(["kiln_linear", *names])


def _entry(pair: DtypePair) -> str:
    arguments = (
        "void* out, const void* activations, const void* const* weights, const float* const* scales, "
        "const int64_t* num_scales, const int64_t* outputs, int64_t count, int64_t rows, int64_t inputs, "
        "const int32_t* live, int64_t groups"
    )
    return f"{name_function(*pair)}({arguments})"


class LinearCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code. Inputs: activations, weights, scales, and perhaps numbers of live
    rows. Its constant arguments: the numbers of weights and of scales.
    """

    @classmethod
    def of(
        cls,
        op: torch._ops.OpOverload,
        activations: Any,
        weights: Sequence[Any],
        scales: Sequence[Any],
        live_rows: Any = None,
        *,
        others: Sequence[Any] = (),
        constants: Sequence[int] = (),
    ) -> ir.TensorBox:
        """Makes the call of `kiln::linear` with its operands, or of an operator that has others, too."""
        live = [] if live_rows is None else [live_rows]
        inputs = [make_contiguous(tensor) for tensor in (activations, *weights, *scales, *live, *others)]
        layout = lay_out(inputs[0], [*inputs[0].get_size()[:-1], sum(weight.get_size()[0] for weight in weights)])
        constants = (len(weights), len(scales), *constants)
        return ir.TensorBox.create(cls(layout=layout, inputs=inputs, constant_args=constants, op_overload=op))

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        """Writes the call."""
        self.multiply(wrapper, self.inputs, *self.constant_args)

    def multiply(self, wrapper: PythonWrapperCodegen, inputs: Sequence[Any], num_weights: int, num_scales: int) -> None:
        """Writes the call of `kiln::linear`."""
        activations, *others = inputs
        weights, others = others[:num_weights], others[num_weights:]
        scales, live = others[:num_scales], others[num_scales:]
        pair = activations.get_dtype(), weights[0].get_dtype()
        declare(wrapper, _entry(pair))
        *rows, num_inputs = activations.get_size()
        wrapper.writelines(
            [
                "{",
                f"    const void* const weights[] = {{{join_pointers(weights)}}};",
                f"    const int64_t outputs[] = {{{join_sizes(weights)}}};",
                f"    const void* activations = {point(activations)};",
                f"    const int32_t* live = {point(live[0] if live else None)};",
                *(
                    [
                        f"    const float* const scales[] = {{{', '.join(map(point, scales))}}};",
                        f"    const int64_t num_scales[] = {{{', '.join(map(_count_scales, scales))}}};",
                    ]
                    if scales
                    else ["    const float* const* const scales = nullptr;", "    const int64_t* num_scales = nullptr;"]
                ),
                f"    {name_function(*pair)}({self.get_name()}.data_ptr(), activations, weights, scales, num_scales,",
                f"        outputs, {len(weights)}, {torch.Size(rows).numel()}, {num_inputs}, live,",
                f"        {live[0].get_size()[0] if live else 1});",
                "}",
            ]
        )


def _count_scales(scales: Any) -> str:
    """Scales of an output; 0 if there is one for all of them."""
    outputs, *groups = scales.get_size()
    return str(groups[0]) if groups else "0" if outputs == 1 else "1"


@register_lowering(torch.ops.kiln.linear.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_linear(*operands: Any) -> Any:
    return LinearCall.of(torch.ops.kiln.linear.default, *operands)
