"""Loops over a vocabulary, which leave out rows that are not live.

`kiln::linear` leaves the logits of such rows unwritten, so nothing may depend on what is made of them, except that an
index must lie within what it indexes. `guard_indices` sees to that; then loops over the logits of each row, and over
whatever is made of them, need not run for rows that are not live. A sum, a maximum or a place that such a loop finds
has the value of an empty row then, and a tensor that it writes stays unwritten. If all that becomes of it are picked
tokens, it leaves out rows of which no token is picked, too: those whose tokens the host picks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._inductor.codegen.cpp import CppKernelProxy
from torch._inductor.graph import SubgraphLowering
from torch._inductor.ir import ExternKernelOut
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from bundle.abi.inputs import SAMPLING_PARAMS
from compiler_svc.lower.job import PickedTokens
from compiler_svc.lower.limited_loop import COUNT, PARAMS, LimitedLoop, StepShape

#: Names of arguments that operators take indices by.
_INDEX_ARGUMENTS: Final = {"index", "indices"}


def guard_indices(module: GraphModule, live_rows: Mapping[int, Node]) -> bool:
    """Keeps indices in range that a graph computes from logits, whatever values the logits have.

    The graph's linear layers are calls of `kiln::linear`. Returns whether it was possible: whether `gather` alone takes
    such indices.
    """
    if not live_rows:
        return False
    made_of_logits: set[Node] = set()
    for node in list(module.graph.nodes):
        is_source = node.target is torch.ops.kiln.linear.default and node.all_input_nodes[0].meta["val"].dim() == 2
        if not is_source and made_of_logits.isdisjoint(node.all_input_nodes):
            continue
        made_of_logits.add(node)
        if not made_of_logits.isdisjoint(_list_indices(node)):
            if node.target is not torch.ops.aten.gather.default:
                return False
            _clamp_index(module, node)
    module.graph.lint()
    module.recompile()
    return True


def _list_indices(node: Node) -> Iterator[Node]:
    if not isinstance(node.target, OpOverload):
        return
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # noqa: SLF001 - the only way
        if argument.name in _INDEX_ARGUMENTS:
            yield from (one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Node))


def _clamp_index(module: GraphModule, gather: Node) -> None:
    arguments: Sequence[Any] = gather.args
    values, dim, index, *others = arguments
    last = values.meta["val"].shape[dim] - 1
    with module.graph.inserting_before(gather):
        clamped = module.graph.call_function(torch.ops.aten.clamp.default, (index, 0, last))
    gather.args = (values, dim, clamped, *others)


def limit_candidates(module: GraphModule, picked: PickedTokens | None, live_rows: Mapping[int, Node]) -> None:
    """Lets calls of `kiln::take_top` that find tokens alone leave out rows of which no token is picked.

    `live_rows` is as `find_live_rows` returned it.
    """
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.kiln.take_top.default)
    calls = [call for call in calls if picked is not None and _finds_tokens_alone(call, picked.tokens)]
    if picked is None or not calls:
        return
    params = module.graph.find_nodes(op="placeholder")[picked.sampling_params]
    rows = params.meta["val"].shape[0]
    with module.graph.inserting_before(calls[0]):
        numbers = module.graph.call_function(torch.ops.aten.arange.default, (rows,), {"dtype": torch.int32})
        is_live = module.graph.call_function(torch.ops.aten.lt.Tensor, (numbers, live_rows[rows]))
        top_k = module.graph.call_function(torch.ops.aten.select.int, (params, 1, 0))
        is_picked = module.graph.call_function(torch.ops.aten.ge.Scalar, (top_k, 0))
        both = module.graph.call_function(torch.ops.aten.logical_and.default, (is_live, is_picked))
        # Each row is a group of its own.
        counts = module.graph.call_function(torch.ops.aten.to.dtype, (both, torch.int32))
    for call in calls:
        call.args = (*call.args[:2], counts)
    module.graph.lint()
    module.recompile()


def _finds_tokens_alone(node: Node, tokens: int) -> bool:
    """Whether nothing but one output depends on a node."""
    (output,) = node.graph.find_nodes(op="output")
    made = {node}
    for one in node.graph.nodes:
        if not made.isdisjoint(one.all_input_nodes):
            made.add(one)
    outputs: Sequence[Any] = output.args[0]
    others = {one for place, one in enumerate(outputs) if place != tokens}
    return made.isdisjoint(others) and all(one.target is not torch.ops.aten.copy_.default for one in made)


def limit_rows(
    kernel: CppKernelProxy, nodes: Sequence[Any], step: StepShape, picked: PickedTokens | None = None
) -> None:
    """Lets a kernel's loop over what each row has end at once in rows that are not live, if all that the loop computes
    is made of logits, row by row. The kernel's code is not written yet. `picked` says for which rows it finds tokens.
    """
    loops = kernel.loop_nest.loops
    if len(loops) != 2 or step.rows == 1 or loops[0].size != step.rows or loops[0].steps != 1 or loops[1].size == 1:
        return
    # Operations with one value for each row come behind the loop.
    inside = [node for node in nodes if len(node._body.iter_vars) + len(node._body.reduce_vars) == 2]  # noqa: SLF001
    if inside and all(_goes_by_rows(node, step.rows) for node in inside):
        is_live = f"{loops[0].var} * {step.tokens} < {COUNT}"
        if picked is not None and _makes_tokens_alone(nodes, picked.tokens):
            is_live += f" && !({PARAMS}[{loops[0].var} * {len(SAMPLING_PARAMS)}] < 0)"
        loops[1] = LimitedLoop.of(loops[1], f"{is_live} ? {loops[1].size} : 0")


def _goes_by_rows(node: Any, rows: int) -> bool:
    """Whether an operation makes one row of each row of something that is made of logits."""
    body = node._body  # noqa: SLF001 - Inductor's own code reads it
    row = body.iter_vars[0]

    def has_rows(name: str, indices: Collection[Any]) -> bool:
        buffer = V.graph.get_buffer(name)
        return buffer.get_size()[0] == rows and all(index.coeff(row) == buffer.get_stride()[0] for index in indices)

    read = [dep.name for dep in node.read_writes.reads if dep.name in V.graph.scheduler.name_to_buf]
    return all(has_rows(dep.name, [body.get_write_expr(dep.name)]) for dep in node.read_writes.writes) and any(
        _is_made_of_logits(name) and has_rows(name, body.get_all_read_expr(name)) for name in read
    )


def _is_made_of_logits(name: str) -> bool:
    """Whether a tensor of the graph in progress depends on 2-dimensional results of `kiln::linear` for live rows."""
    buffers, seen, todo = V.graph.scheduler.name_to_buf, {name}, [name]
    while todo:
        buffer = buffers[todo.pop()]
        if _is_limited_linear(buffer.node):
            return True
        read = {dep.name for dep in buffer.defining_op.read_writes.reads} & buffers.keys()
        todo += read - seen
        seen |= read
    return False


def _makes_tokens_alone(nodes: Sequence[Any], tokens: int) -> bool:
    """Whether nothing but one output of the library depends on what operations write."""
    if isinstance(V.graph, SubgraphLowering):
        # A layer's outputs are not the library's.
        return False
    buffers = V.graph.scheduler.name_to_buf
    todo = [name for place, name in enumerate(V.graph.get_output_names()) if place != tokens]
    todo += [name for name, buffer in buffers.items() if buffer.get_mutations()]
    needed = set(todo)
    while todo:
        buffer = buffers.get(todo.pop())
        read = set() if buffer is None else {dep.name for dep in buffer.defining_op.read_writes.reads} - needed
        todo += read
        needed |= read
    return needed.isdisjoint(dep.name for node in nodes for dep in node.read_writes.writes)


def _is_limited_linear(call: Any) -> bool:
    """Whether a tensor [rows, outputs] is the result of `kiln::linear` for live rows."""
    if not isinstance(call, ExternKernelOut) or call.op_overload is not torch.ops.kiln.linear.default:
        return False
    return len(call.inputs) > 1 + sum(call.constant_args) and len(call.get_size()) == 2
