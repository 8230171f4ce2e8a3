"""`kiln::linear`: multiplies rows of activations by weights, with a kernel of our own in the library.

Decoding is bound by the speed of reading weights. The matrix products that Inductor would call read them at a fraction
of the memory's bandwidth. See kernels/linear.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node
from torch.nn import functional

from compiler_svc.lower.common_objects import compile_once, read_kernel
from compiler_svc.lower.job import LoweringJob

#: Element types of the kernel's template, by dtype.
_ELEMENTS: Final = {torch.float32: "float", torch.bfloat16: "kiln::BFloat16"}
#: Stands for any number of rows.
ALL_ROWS: Final = sys.maxsize
#: Rows up to which the kernel serves, by dtype and instruction set; ATen multiplies more rows and other dtypes.
#: `bench.kernels` measures both. The kernel serves unless ATen is faster by more than `ATENS_LEAD`: it skips rows that
#: are not live, and what it chooses by the number of rows follows the live ones, not the bucket's.
MAX_ROWS: Final[Mapping[torch.dtype, Mapping[str, int]]] = {
    torch.float32: {
        "x86-64-v3": ALL_ROWS,
        "x86-64-v4": ALL_ROWS,
        "x86-64-v4-vnni": ALL_ROWS,
        "x86-64-v4-bf16": ALL_ROWS,
        "x86-64-v4-amx": ALL_ROWS,
    },
    torch.bfloat16: {
        "x86-64-v3": ALL_ROWS,
        "x86-64-v4": ALL_ROWS,
        "x86-64-v4-vnni": ALL_ROWS,
        "x86-64-v4-bf16": ALL_ROWS,
        "x86-64-v4-amx": ALL_ROWS,
    },
}
ATENS_LEAD: Final = 0.05
#: Types in generated code, which knows no narrow floats.
_CPP_TYPES: Final = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.int32: "int32_t"}
#: Dtypes whose functions the code of a library in progress already declares.
_DECLARED: Final[WeakKeyDictionary[PythonWrapperCodegen, set[torch.dtype]]] = WeakKeyDictionary()


@torch.library.custom_op("kiln::linear", mutates_args=())
def linear(
    activations: Tensor,
    weights: Sequence[Tensor],
    live_rows: Tensor | None = None,  # noqa: ARG001 - a hint, which this reference does without
) -> Tensor:
    """Computes `functional.linear` with several weights at once.

    A row's results depend on the row and the weights alone: not on other rows or the number of threads. Its last bits
    depend on whether 128 rows are live, because compiled code adds in another order then, and on no other number. In
    bfloat16 for `x86-64-v4-amx` they depend on no number.

    Args:
        activations: [..., inputs], float32 or bfloat16.
        weights: Each [outputs of this weight, inputs], of the same dtype.
        live_rows: int32 [groups]; None if all rows are live. The rows of activations, numbered through all their
            dimensions, are so many groups of equal size; of each group, only that many leading rows are live. So
            [1] counts leading rows, and [R] counts the leading tokens of each row of [R, T, inputs].

    Returns:
        [..., sum of outputs]: the results side by side. Compiled code leaves those of rows that are not live unwritten,
        and spends no time on them.
    """
    return torch.cat([functional.linear(activations, weight) for weight in weights], -1)


@linear.register_fake
def _(activations: Tensor, weights: Sequence[Tensor], _live_rows: Tensor | None = None) -> Tensor:
    return activations.new_empty((*activations.shape[:-1], sum(weight.shape[0] for weight in weights)))


def use_linear_kernel(module: GraphModule, isa: str, live_rows: Mapping[int, Node] = MappingProxyType({})) -> int:
    """Replaces linear layers in a graph by `kiln::linear`; layers with the same input share one call.

    Keeps layers whose weight the graph computes, and layers that `MAX_ROWS` leaves to ATen.

    Args:
        module: Is changed.
        isa: Name of the instruction set for which the graph is compiled.
        live_rows: Tensors of the graph that say which rows are live, as `kiln::linear` takes them, by the number of
            rows of the activations that they are for; such as [1] by the number of sequences, and [sequences] by the
            number of their tokens. They must come before the layers.

    Returns:
        Number of calls of the kernel in the graph.
    """
    layers_by_input: dict[Node, list[_Layer]] = {}
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        layer = _Layer.of(node)
        if layer.fits(isa):
            layers_by_input.setdefault(layer.activations, []).append(layer)
    for layers in layers_by_input.values():
        # The input may have been a layer that this loop has replaced.
        activations = _Layer.of(layers[0].node).activations
        live = live_rows.get(activations.meta["val"].shape[:-1].numel())
        _join(module.graph, activations, layers, live)
    module.graph.lint()
    module.recompile()
    return len(layers_by_input)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A call of `aten.linear` in a graph."""

    node: Node
    activations: Node
    weight: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> Self:
        def argument(index: int) -> Any:
            return node.args[index] if index < len(node.args) else None

        return cls(node, argument(0), argument(1), argument(2))

    @property
    def outputs(self) -> int:
        outputs: int = self.weight.meta["val"].shape[0]
        return outputs

    def fits(self, isa: str) -> bool:
        """Whether the kernel serves the layer."""
        activations, weight = self.activations.meta["val"], self.weight.meta["val"]
        return (
            self.weight.op in {"get_attr", "placeholder"}
            and weight.dtype == activations.dtype
            and activations.shape[:-1].numel() <= MAX_ROWS.get(activations.dtype, {}).get(isa, 0)
        )


def _join(graph: torch.fx.Graph, activations: Node, layers: Sequence[_Layer], live_rows: Node | None) -> None:
    with graph.inserting_before(layers[0].node):
        weights = [layer.weight for layer in layers]
        joined = graph.call_function(torch.ops.kiln.linear.default, (activations, weights, live_rows))
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


def compile_linear_kernel(job: LoweringJob) -> Path:
    """Compiles the object that libraries with calls of `kiln::linear` link with. Valid inside `steered`."""
    return compile_once(job, "linear", write_kernel_source())


def write_kernel_source() -> str:
    """Returns the kernel's source as one text, with one function for each dtype."""
    entries = [
        f'extern "C" void {_entry(dtype)} {{\n'
        f"  kiln::multiply<{element}>(out, activations, weights, outputs, count, rows, inputs, live, groups);\n}}\n"
        for dtype, element in _ELEMENTS.items()
    ]
    return "".join([read_kernel("linear.cpp"), *entries])


def name_function(dtype: torch.dtype) -> str:
    """Names the kernel's function for a dtype."""
    return f"kiln_linear_{str(dtype).removeprefix('torch.')}"


def _entry(dtype: torch.dtype) -> str:
    """Declares the function for a dtype."""
    arguments = (
        "void* out, const void* activations, const void* const* weights, const int64_t* outputs, int64_t count, "
        "int64_t rows, int64_t inputs, const int32_t* live, int64_t groups"
    )
    return f"{name_function(dtype)}({arguments})"


class _LinearCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code.

    Inputs: activations, weights, and perhaps numbers of live rows. Its constant argument: the number of weights.
    """

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        """Writes the call into the wrapper."""
        activations, *others = self.inputs
        (num_weights,) = self.constant_args
        weights, live = others[:num_weights], others[num_weights:]
        dtype = self.get_dtype()
        declared = _DECLARED.setdefault(wrapper, set())
        if dtype not in declared:
            declared.add(dtype)
            wrapper.header.splice(f'extern "C" void {_entry(dtype)};\n')
        *rows, inputs = activations.get_size()
        pointers = ", ".join(f"{weight.get_name()}.data_ptr()" for weight in weights)
        outputs = ", ".join(str(weight.get_size()[0]) for weight in weights)
        groups = live[0].get_size()[0] if live else 1
        wrapper.writelines(
            [
                "{",
                f"    const void* const weights[] = {{{pointers}}};",
                f"    const int64_t outputs[] = {{{outputs}}};",
                f"    const void* activations = {_pointer(activations)};",
                f"    const int32_t* live = {_pointer(live[0]) if live else 'nullptr'};",
                f"    {name_function(dtype)}({self.get_name()}.data_ptr(), activations, weights, outputs,",
                f"        {len(weights)}, {torch.Size(rows).numel()}, {inputs}, live, {groups});",
                "}",
            ]
        )


def _pointer(tensor: Any) -> str:
    """Writes the pointer to a tensor's first element, which may lie within another tensor's memory."""
    element = _CPP_TYPES[tensor.get_dtype()]
    return f"static_cast<const {element}*>({tensor.get_name()}.data_ptr()) + {tensor.get_layout().offset}"


@register_lowering(torch.ops.kiln.linear.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_linear(activations: Any, weights: Sequence[Any], live_rows: Any = None) -> Any:
    tensors = [activations, *weights, *([] if live_rows is None else [live_rows])]
    inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(tensor)) for tensor in tensors]
    first = inputs[0]
    size = [*first.get_size()[:-1], sum(weight.get_size()[0] for weight in weights)]
    strides = ir.FlexibleLayout.contiguous_strides(size)
    layout = ir.FixedLayout(first.get_device(), first.get_dtype(), size, strides)
    op = torch.ops.kiln.linear.default
    call = _LinearCall(layout=layout, inputs=inputs, constant_args=(len(weights),), op_overload=op)
    return ir.TensorBox.create(call)
