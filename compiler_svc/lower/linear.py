"""`kiln::linear`: multiplies few rows of activations by weights, with a kernel of our own in the library.

Decoding is bound by the speed of reading weights. The matrix products that Inductor would call read them at a fraction
of the memory's bandwidth. See kernels/linear.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node
from torch.nn import functional

from compiler_svc.lower.common_objects import compile_once
from compiler_svc.lower.job import LoweringJob

#: With more rows than this, matrix products for many rows use the caches better.
MAX_ROWS: Final = 256
#: Element type of the kernel's template, by dtype; bfloat16 is passed as its bits.
_ELEMENTS: Final = {torch.float32: "float", torch.bfloat16: "uint16_t"}
_SOURCE: Final = Path(__file__).with_name("kernels") / "linear.cpp"
#: Prefix of the functions' names.
_PREFIX: Final = "kiln_linear_"
#: Elements whose functions the code of a library in progress already declares.
_DECLARED: Final[WeakKeyDictionary[PythonWrapperCodegen, set[str]]] = WeakKeyDictionary()


@torch.library.custom_op("kiln::linear", mutates_args=())
def linear(activations: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Computes `functional.linear` with several weights at once.

    Args:
        activations: [..., inputs], float32 or bfloat16.
        weights: Each [outputs of this weight, inputs], of the same dtype.

    Returns:
        [..., sum of outputs]: the results side by side.
    """
    return torch.cat([functional.linear(activations, weight) for weight in weights], -1)


@linear.register_fake
def _(activations: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return activations.new_empty((*activations.shape[:-1], sum(weight.shape[0] for weight in weights)))


def use_linear_kernel(module: GraphModule) -> int:
    """Replaces linear layers of few rows in a graph by `kiln::linear`; layers with the same input share one call.

    Keeps layers whose weight the graph computes, and layers with dtypes that the kernel lacks.

    Returns:
        Number of calls of the kernel in the graph.
    """
    layers_by_input: dict[Node, list[_Layer]] = {}
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        layer = _Layer.of(node)
        if layer.fits:
            layers_by_input.setdefault(layer.activations, []).append(layer)
    for activations, layers in layers_by_input.items():
        _join(module.graph, activations, layers)
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

    @property
    def fits(self) -> bool:
        activations, weight = self.activations.meta["val"], self.weight.meta["val"]
        return (
            self.weight.op in {"get_attr", "placeholder"}
            and activations.dtype in _ELEMENTS
            and weight.dtype == activations.dtype
            and activations.shape[:-1].numel() <= MAX_ROWS
        )


def _join(graph: torch.fx.Graph, activations: Node, layers: Sequence[_Layer]) -> None:
    with graph.inserting_before(layers[0].node):
        weights = [layer.weight for layer in layers]
        joined = graph.call_function(torch.ops.kiln.linear.default, (activations, weights))
    first = 0
    for layer in layers:
        with graph.inserting_before(layer.node):
            result = graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, first, first + layer.outputs))
            if layer.bias is not None:
                result = graph.call_function(torch.ops.aten.add.Tensor, (result, layer.bias))
        first += layer.outputs
        layer.node.replace_all_uses_with(result)
        graph.erase_node(layer.node)


def compile_linear_kernel(job: LoweringJob) -> Path:
    """Compiles the object that libraries with calls of `kiln::linear` link with. Valid inside `steered`."""
    entries = [
        f'extern "C" void {_entry(element)} {{\n'
        f"  kiln::multiply<{element}>(out, activations, weights, outputs, count, rows, inputs);\n}}\n"
        for element in _ELEMENTS.values()
    ]
    return compile_once(job, "linear", "".join([_SOURCE.read_text(), *entries]))


def _entry(element: str) -> str:
    """Declares the function for one element type."""
    arguments = (
        "void* out, const void* activations, const void* const* weights, const int64_t* outputs, int64_t count, "
        "int64_t rows, int64_t inputs"
    )
    return f"{_PREFIX}{element}({arguments})"


class _LinearCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code."""

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        """Writes the call into the wrapper."""
        activations, *weights = self.inputs
        element = _ELEMENTS[self.get_dtype()]
        declared = _DECLARED.setdefault(wrapper, set())
        if element not in declared:
            declared.add(element)
            wrapper.header.splice(f'extern "C" void {_entry(element)};\n')
        *rows, inputs = activations.get_size()
        pointers = ", ".join(f"{weight.get_name()}.data_ptr()" for weight in weights)
        outputs = ", ".join(str(weight.get_size()[0]) for weight in weights)
        offset_bytes = activations.get_layout().offset * self.get_dtype().itemsize
        wrapper.writelines(
            [
                "{",
                f"    const void* const weights[] = {{{pointers}}};",
                f"    const int64_t outputs[] = {{{outputs}}};",
                f"    const char* activations = static_cast<const char*>({activations.get_name()}.data_ptr());",
                f"    {_PREFIX}{element}({self.get_name()}.data_ptr(), activations + {offset_bytes}, weights, outputs,",
                f"        {len(weights)}, {torch.Size(rows).numel()}, {inputs});",
                "}",
            ]
        )


@register_lowering(torch.ops.kiln.linear.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_linear(activations: Any, weights: Sequence[Any]) -> Any:
    inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in (activations, *weights)]
    first = inputs[0]
    size = [*first.get_size()[:-1], sum(weight.get_size()[0] for weight in inputs[1:])]
    strides = ir.FlexibleLayout.contiguous_strides(size)
    layout = ir.FixedLayout(first.get_device(), first.get_dtype(), size, strides)
    call = _LinearCall(layout=layout, inputs=inputs, op_overload=torch.ops.kiln.linear.default)
    return ir.TensorBox.create(call)
