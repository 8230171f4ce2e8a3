"""`kiln::adapt`: adds what LoRA adapters change, with a kernel of our own. See kernels/adapt.cpp.

Graphs of torch's operators would read the matrices of every row's adapter, and compute rows that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node

from compiler_svc.lower.common_objects import compile_once, read_kernel
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.kernel_calls import declare, lay_out, make_contiguous, point
from compiler_svc.lower.linear import TYPES
from execution.adapters import add_adapters

_ARGUMENTS: Final = (
    "void* out, const void* rows, const void* a, const void* b, const int32_t* slots, int64_t sequences, "
    "int64_t tokens, int64_t inputs, int64_t outputs, int64_t rank, const int32_t* live, int64_t groups"
)


@torch.library.custom_op("kiln::adapt_live", mutates_args=())
def adapt_live(rows: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, live_rows: Tensor | None = None) -> Tensor:  # noqa: ARG001 - a hint
    """Computes `kiln::adapt`. Compiled code does not round A x, leaves results of rows that are not live unwritten, and
    spends no time on them. `live_rows` is as `kiln::linear` takes it.
    """
    return add_adapters(rows, a, b, adapter_ids)


@adapt_live.register_fake
def _(rows: Tensor, _a: Tensor, b: Tensor, _adapter_ids: Tensor, _live_rows: Tensor | None = None) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], b.shape[1]))


def use_adapt_kernel(module: GraphModule, live_rows: Mapping[int, Node]) -> set[torch.dtype]:
    """Replaces `kiln::adapt` in a graph by `kiln::adapt_live`; returns the dtypes of all calls. `live_rows` is as
    `use_linear_kernel` takes it.
    """
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.kiln.adapt.default)
    for call in calls:
        live = live_rows.get(call.args[0].meta["val"].shape[:-1].numel())
        call.target, call.args = torch.ops.kiln.adapt_live.default, (*call.args, live)
    module.graph.lint()
    module.recompile()
    return {call.meta["val"].dtype for call in calls}


def compile_adapt_kernel(job: LoweringJob, dtype: torch.dtype) -> Path:
    """Compiles the object that libraries with calls of `kiln::adapt` in a dtype link with. Valid inside `steered`."""
    return compile_once(job, name_function(dtype), write_kernel_source(dtype))


def compile_adapt_kernels(job: LoweringJob) -> None:
    """Does the same for the dtypes of most models."""
    for dtype in (torch.float32, torch.bfloat16):
        compile_adapt_kernel(job, dtype)


def write_kernel_source(dtype: torch.dtype) -> str:
    """Returns the kernel's source as one text, with the function for a dtype."""
    element = TYPES[dtype]
    call = f"kiln::adapt<{element}>(out, rows, a, b, slots, sequences, tokens, inputs, outputs, rank, live, groups);"
    return f'{read_kernel("adapt.cpp")}extern "C" void {_entry(dtype)} {{\n  {call}\n}}\n'


def name_function(dtype: torch.dtype) -> str:
    """Names the kernel's function for a dtype."""
    return f"kiln_adapt_{str(dtype).removeprefix('torch.')}"


def _entry(dtype: torch.dtype) -> str:
    return f"{name_function(dtype)}({_ARGUMENTS})"


class _AdaptCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code. Inputs: rows, A, B, slots, and perhaps numbers of live rows."""

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        rows, a, b, slots, *live = self.inputs
        declare(wrapper, _entry(rows.get_dtype()))
        *leading, inputs = rows.get_size()
        sequences = slots.get_size()[0]
        pointers = ", ".join(point(one) for one in (rows, a, b, slots))
        wrapper.writeline(
            f"{name_function(rows.get_dtype())}({self.get_name()}.data_ptr(), {pointers}, {sequences}, "
            f"{torch.Size(leading).numel() // sequences}, {inputs}, {b.get_size()[1]}, {a.get_size()[1]}, "
            f"{point(live[0] if live else None)}, {live[0].get_size()[0] if live else 1});"
        )


@register_lowering(torch.ops.kiln.adapt_live.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_adapt(rows: Any, a: Any, b: Any, slots: Any, live_rows: Any = None) -> Any:
    inputs = [make_contiguous(one) for one in (rows, a, b, slots, *([] if live_rows is None else [live_rows]))]
    layout = lay_out(inputs[0], [*inputs[0].get_size()[:-1], inputs[2].get_size()[1]])
    op = torch.ops.kiln.adapt_live.default
    return ir.TensorBox.create(_AdaptCall(layout=layout, inputs=inputs, constant_args=(), op_overload=op))
