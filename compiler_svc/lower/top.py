"""`kiln::take_top`: finds the candidates of sampling in live rows, with a kernel of our own. See kernels/top.cpp.
torch's `topk` costs as much in idle rows as in others: a tenth of a step of 16 rows, of which one is live.
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

_FUNCTION: Final = "kiln_take_top"
_ENTRY: Final = (
    f"{_FUNCTION}(int64_t* places, const int64_t* keys, int64_t rows, int64_t width, int64_t count, "
    "const int32_t* live, int64_t groups)"
)


@torch.library.custom_op("kiln::take_top", mutates_args=())
def take_top(keys: Tensor, count: int, live_rows: Tensor) -> Tensor:
    """Finds the largest keys of each live row.

    Args:
        keys: int64 [rows, width], different within a row.
        live_rows: int32 [groups]: how many rows of each group are live; the first ones. Groups have equally many rows.

    Returns:
        int64 [rows, count]: places, of the largest key first; in other rows 0, 1, 2, …
    """
    rows, places = torch.arange(keys.shape[0] // live_rows.shape[0]), torch.arange(count)
    is_live = (rows < live_rows[:, None]).flatten()
    return torch.where(is_live[:, None], keys.topk(count).indices, places)


@take_top.register_fake
def _(keys: Tensor, count: int, _live_rows: Tensor) -> Tensor:
    return keys.new_empty((keys.shape[0], count))


def use_top_kernel(module: GraphModule, live_rows: Mapping[int, Node]) -> int:
    """Replaces `topk` of keys, of which a graph uses the places alone, by `kiln::take_top`. `live_rows` is as
    `use_linear_kernel` takes it.
    """
    num_calls = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        keys, count, *options = node.args
        value, results = keys.meta["val"], {user.args[1]: user for user in node.users}
        live = live_rows.get(value.shape[0])
        uses_values = 0 in results and results[0].users
        if live is None or value.dtype != torch.int64 or value.dim() != 2 or options not in ([], [-1]) or uses_values:
            continue
        with module.graph.inserting_before(node):
            places = module.graph.call_function(torch.ops.kiln.take_top.default, (keys, count, live))
        results[1].replace_all_uses_with(places)
        for replaced in (*results.values(), node):
            module.graph.erase_node(replaced)
        num_calls += 1
    module.graph.lint()
    module.recompile()
    return num_calls


def compile_top_kernel(job: LoweringJob) -> Path:
    """Compiles the object that libraries with calls of `kiln::take_top` link with. Valid inside `steered`."""
    return compile_once(job, "top", write_kernel_source())


def write_kernel_source() -> str:
    """Returns the kernel's source as one text."""
    call = "kiln::take_top(places, keys, rows, width, count, live, groups);"
    return f'{read_kernel("top.cpp")}extern "C" void {_ENTRY} {{\n  {call}\n}}\n'


class _TopCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code. Inputs: keys, number of live rows. Constant argument: the count."""

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        declare(wrapper, _ENTRY)
        keys, live = self.inputs
        (count,) = self.constant_args
        rows, width = keys.get_size()
        wrapper.writeline(
            f"{_FUNCTION}(static_cast<int64_t*>({self.get_name()}.data_ptr()), {point(keys)}, "
            f"{rows}, {width}, {count}, {point(live)}, {live.get_size()[0]});"
        )


@register_lowering(torch.ops.kiln.take_top.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_top(keys: Any, count: int, live_rows: Any) -> Any:
    inputs = [make_contiguous(one) for one in (keys, live_rows)]
    layout = lay_out(inputs[0], [inputs[0].get_size()[0], count])
    op = torch.ops.kiln.take_top.default
    return ir.TensorBox.create(_TopCall(layout=layout, inputs=inputs, constant_args=(count,), op_overload=op))
