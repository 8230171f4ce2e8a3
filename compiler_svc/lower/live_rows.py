"""Which tokens of a step are live, for the code of libraries, which spends no time on others.

`kiln::linear` takes numbers of live rows. Loops that Inductor writes over the tokens of a step end with the last live
one; what they would compute of later ones stays unwritten. A library's inputs say which that is, and the library keeps
it in a variable while it runs a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch._inductor.codegen.cpp import CppKernelProxy, OuterLoopFusedSchedulerNode
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from compiler_svc.lower.job import LiveInputs, PickedTokens
from compiler_svc.lower.limited_loop import COUNT, PARAMS, LimitedLoop, StepShape
from compiler_svc.lower.live_logits import limit_rows

#: The shape of the steps of the library in progress; None if nothing says which of their tokens are live.
_STEP: Final[ContextVar[StepShape | None]] = ContextVar("step", default=None)
#: Whether indices of the library in progress are in range whatever its logits are; see `live_logits`.
_GUARDED: Final[ContextVar[bool]] = ContextVar("guarded", default=False)
#: What says for which rows the library in progress picks tokens, if anything does.
_PICKED: Final[ContextVar[PickedTokens | None]] = ContextVar("picked", default=None)


def find_live_rows(module: GraphModule, live: LiveInputs | None) -> Mapping[int, Node]:
    """Finds what says which rows of activations are live, as `kiln::linear` takes it, by the number of rows.

    The module gets operations that compute it, in front of all others: [1] for one row of each sequence, [sequences]
    for all their tokens. Empty if nothing is known.
    """
    if live is None:
        return {}
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    step = StepShape(*inputs[live.tokens].meta["val"].shape)
    num_live = inputs[live.rows]
    if step.tokens == 1:
        return {step.rows: num_live}
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
        numbers = graph.call_function(torch.ops.aten.arange.default, (step.rows,), {"dtype": torch.int32})
        is_live = graph.call_function(torch.ops.aten.lt.Tensor, (numbers, num_live))
        counts = step.tokens if live.counts is None else inputs[live.counts]
        live_tokens = graph.call_function(torch.ops.aten.mul.Tensor, (is_live, counts))
        live_tokens = graph.call_function(torch.ops.aten.to.dtype, (live_tokens, torch.int32))
    return {step.rows: num_live, step.rows * step.tokens: live_tokens}


def write_count(live: LiveInputs, *, tells_collectives: bool) -> str:
    """Writes C++ code that sets the variables from `input_handles`, the inputs of the graph that is lowered now.
    `tells_collectives` says whether the graph's collectives move live tokens only.
    """
    inputs = list(V.graph.graph_inputs.values())
    num_rows, tokens = inputs[live.tokens].get_size()
    tell = f"kiln_begin_step({num_rows}, {tokens}, {COUNT});\n" if tells_collectives else ""
    in_last_row = tokens if live.counts is None else f"read({live.counts})[rows - 1]"
    params = "" if live.picked is None else f"{PARAMS} = static_cast<float*>(find({live.picked.sampling_params}));\n"
    return (
        "const auto find = [&](size_t input) {\n"
        "  void* data = nullptr;\n"
        "  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(input_handles[input], &data));\n"
        "  return data;\n"
        "};\n"
        "const auto read = [&](size_t input) { return static_cast<const int32_t*>(find(input)); };\n"
        f"const int64_t rows = *read({live.rows});\n"
        f"{COUNT} = rows == 0 ? 0 : (rows - 1) * {tokens} + {in_last_row};\n"
        f"{params}{tell}"
    )


def declare_count() -> str:
    """Defines the variables, for the code that calls kernels, and declares the function that tells collectives."""
    return (
        f"int64_t {COUNT} = 0;\nconst float* {PARAMS} = nullptr;\n"
        'extern "C" void kiln_begin_step(int64_t rows, int64_t tokens, int64_t live);\n'
    )


@contextmanager
def limited_loops(module: GraphModule, live: LiveInputs | None, *, guarded: bool = False) -> Iterator[None]:
    """Inside the block, Inductor's loops over the tokens of a step end with the last live one.

    A loop is limited if all that it writes are tensors [rows, tokens, …], in the order of their elements, from what has
    rows of tokens, too. What is smaller, such as positions, is computed whole: other code may read all of it. With
    `guarded`, which `guard_indices` returned, loops over logits leave out rows that are not live, and those that find
    tokens alone rows of which no token is picked.
    """
    step = None
    if live is not None:
        step = StepShape(*module.graph.find_nodes(op="placeholder")[live.tokens].meta["val"].shape)
    # Of a single token nothing can be left out.
    tokens = _STEP.set(step if step != (1, 1) else None), _GUARDED.set(guarded)
    picked = _PICKED.set(None if live is None else live.picked)
    try:
        yield
    finally:
        _STEP.reset(tokens[0])
        _GUARDED.reset(tokens[1])
        _PICKED.reset(picked)


def generate_kernel(kernel: CppKernelProxy, nodes: Sequence[Any]) -> None:
    """Replaces `CppKernelProxy.codegen_nodes`: limits the kernel's outermost loop if it is over tokens, or the loop in
    it if it is over logits.
    """
    _GENERATE(kernel, nodes)
    step, loops = _STEP.get(), kernel.loop_nest.loops
    if step is None or not loops or loops[0].is_reduction:
        return
    elements, rest = divmod(int(loops[0].size), step.rows * step.tokens)
    if rest == 0 and all(_goes_by_tokens(node, step, elements) for node in nodes):
        loops[0] = LimitedLoop.of(loops[0], f"{COUNT} * {elements}")
    elif _GUARDED.get():
        limit_rows(kernel, nodes, step, _PICKED.get())


def join_kernels(node: OuterLoopFusedSchedulerNode, kernels: Sequence[CppKernelProxy]) -> CppKernelProxy:
    """Replaces `OuterLoopFusedSchedulerNode.merge_outer_fusion_kernels`: kernels share the outer loops of the first
    one, each of which is limited only if it is in all of them.
    """
    first = kernels[0].loop_nest.loops
    for depth in range(node.outer_loop_fusion_depth):
        shared = [kernel.loop_nest.loops[depth] for kernel in kernels]
        if isinstance(first[depth], LimitedLoop) and not all(isinstance(loop, LimitedLoop) for loop in shared):
            first[depth] = first[depth].without_bound()
    return _JOIN(node, kernels)


_GENERATE: Final = CppKernelProxy.codegen_nodes
_JOIN: Final = OuterLoopFusedSchedulerNode.merge_outer_fusion_kernels


def _goes_by_tokens(node: Any, step: StepShape, elements: int) -> bool:
    """Whether an operation makes tensors [rows, tokens, …], one token after the other, from what has tokens, too.
    `elements` counts steps of the outermost loop for each token.
    """
    body = node._body  # noqa: SLF001 - Inductor's own code reads it
    for dep in node.read_writes.writes:
        stride = _find_token_stride(dep.name, step) if len(_sizes_of(dep.name)) > 2 else None
        index = body.get_write_expr(dep.name)
        factors = [index.coeff(var) for var in body.iter_vars]
        if stride is None or index != sum(factor * var for factor, var in zip(factors, body.iter_vars, strict=True)):
            return False
        width = sum(factors[place] * (body.var_ranges[var] - 1) for place, var in enumerate(body.iter_vars) if place)
        if not factors or factors[0] * elements != stride or not 0 <= width < factors[0] or min(factors) < 0:
            return False
    read = {
        dep.name for dep in node.read_writes.reads if isinstance(dep, MemoryDep) and _sizes_of(dep.name)[:2] == step
    }
    return bool(read) and all(_reads_by_tokens(body, name, step, elements) for name in read)


def _reads_by_tokens(body: Any, name: str, step: StepShape, elements: int) -> bool:
    """Whether an operation reads a tensor of the shape [rows, tokens, …] one token after the other, as it writes.
    Otherwise that shape is chance, such as that of as many heads as there are tokens.
    """
    stride, first = _find_token_stride(name, step), body.iter_vars[0]
    if stride is None:
        return True
    for index in body.get_all_read_expr(name):
        factor = index.coeff(first)
        if not (index - factor * first).has(first) and factor * elements != stride:
            return False
    return True


def _find_token_stride(name: str, step: StepShape) -> int | None:
    """Finds the distance of successive tokens in a tensor [rows, tokens, …]; None if it is none, or has several."""
    sizes, strides = _sizes_of(name), [int(stride) for stride in V.graph.get_buffer(name).get_stride()]
    if sizes[:2] != step:
        return None
    if step.tokens == 1:
        return strides[0]
    return strides[1] if step.rows == 1 or strides[0] == step.tokens * strides[1] else None


def _sizes_of(name: str) -> tuple[int, ...]:
    return tuple(int(size) for size in V.graph.get_buffer(name).get_size())
