"""`kiln::attend_in_place` in libraries: a kernel of our own that writes the caches it gets. See kernels/attend.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import register_lowering
from torch.fx import Graph, GraphModule, Node

import execution.attention.operators  # noqa: F401 - registers the operators
from compiler_svc.lower.common_objects import compile_once, read_kernel
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.kernel_calls import declare, lay_out, make_contiguous, point
from execution.attention.reference import Step

#: The dtypes of queries and of caches.
DtypePair = tuple[torch.dtype, torch.dtype]
#: Element types of the kernel's templates, by dtype, and how functions' names call them.
_ELEMENTS: Final = {
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float8_e4m3fn: "Float8E4M3",
    torch.int8: "Int8",
}
#: The functions' arguments, in the order of the fields of `Step` in kernels/attend_step.h; null pointers for none.
_ARGUMENTS: Final = (
    "void* attended, const void* queries, const void* keys, const void* values, void* key_cache, void* value_cache, "
    "const int32_t* positions, const int32_t* block_table, const float* sinks, const float* slopes, "
    "const bool* tree_mask, int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, "
    "int64_t block_tokens, int64_t row_blocks, int64_t query_stride, int64_t key_stride, int64_t value_stride, "
    "int64_t tree_stride, double scale, int64_t window, double soft_cap"
)
#: The operator's tensors.
_TENSORS: Final = [field.name for field in fields(Step)]
#: The caches among them.
_CACHES: Final = slice(3, 5)


def use_attend_kernel(module: GraphModule) -> set[DtypePair]:
    """Replaces `kiln::attend` in a graph by `kiln::attend_in_place`; returns the dtypes with which it calls the kernel.

    Where a cache is an input that the graph overwrites with the new cache, and nothing else reads, the input itself is
    written. Other caches are copied first, as the operator says.
    """
    pairs = set()
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.kiln.attend.default):
        attended, key_cache, _ = node.meta["val"]
        pairs.add((attended.dtype, key_cache.dtype))
        _write_in_place(module.graph, node)
    module.graph.lint()
    module.recompile()
    return pairs


def _write_in_place(graph: Graph, node: Node) -> None:
    results = {user.args[1]: user for user in node.users}
    caches = []
    for index, cache in enumerate(node.args[_CACHES], start=1):
        assert isinstance(cache, Node)
        with graph.inserting_before(node):
            is_own = _is_overwritten(cache, node, results.get(index))
            caches.append(cache if is_own else graph.call_function(torch.ops.aten.clone.default, (cache,)))
    arguments = (*node.args[: _CACHES.start], *caches, *node.args[_CACHES.stop :])
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        attended = graph.call_function(torch.ops.kiln.attend_in_place.default, arguments, kwargs)
        attended.meta["val"] = node.meta["val"][0]
    for index, replacement in enumerate((attended, *caches)):
        if index in results:
            results[index].replace_all_uses_with(replacement)
            graph.erase_node(results[index])
    graph.erase_node(node)


def _is_overwritten(cache: Node, node: Node, new: Node | None) -> bool:
    """Whether this call is all that uses a cache, and the graph writes the new cache over it in the end."""
    if cache.op != "placeholder" or new is None:
        return False
    copies = [user for user in new.users if user.target is torch.ops.aten.copy_.default and user.args[0] is cache]
    return len(copies) == 1 and set(cache.users) == {node, copies[0]} and set(new.users) == set(copies)


def compile_attend_kernel(job: LoweringJob, pair: DtypePair) -> Path:
    """Compiles the object that libraries with the kernel for a pair of dtypes link with. Valid inside `steered`."""
    return compile_once(job, name_function(*pair), write_kernel_source([pair]))


def compile_attend_kernels(job: LoweringJob) -> None:
    """Does the same for the dtypes of most models, which keep keys and values in that of queries."""
    for dtype in (torch.float32, torch.bfloat16):
        compile_attend_kernel(job, (dtype, dtype))


def write_kernel_source(pairs: Iterable[DtypePair]) -> str:
    """Returns the kernel's source as one text, with one function for each pair of dtypes."""
    entries = []
    for queries, cache in pairs:
        step = ", ".join(
            _convert(argument, _ELEMENTS[queries], _ELEMENTS[cache]) for argument in _ARGUMENTS.split(", ")
        )
        types = f"{_ELEMENTS[queries]}, {_ELEMENTS[cache]}"
        entries.append(
            f'extern "C" void {name_function(queries, cache)}({_ARGUMENTS}) {{\n'
            f"  using namespace kiln;\n  attend(Step<{types}>{{{step}}});\n}}\n"
        )
    return "".join([read_kernel("attend.cpp"), *entries])


def _convert(argument: str, query: str, cached: str) -> str:
    """Returns the field of `Step` that a function's argument becomes."""
    kind, name = argument.rsplit(" ", 1)
    if kind.endswith("void*"):
        element = cached if name.endswith("_cache") else query
        return f"static_cast<{kind.replace('void', element)}>({name})"
    return f"static_cast<float>({name})" if kind == "double" else name


def name_function(queries: torch.dtype, cache: torch.dtype) -> str:
    """Names the function for one pair of dtypes."""
    return f"kiln_attend_{_ELEMENTS[queries]}_{_ELEMENTS[cache]}"


class _AttendCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code: makes the output, and writes two of its inputs. `given` says which of
    the operator's tensors there are, by index in its arguments.
    """

    given: Sequence[int]
    options: dict[str, Any]

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        tensors: dict[str, Any] = dict.fromkeys(_TENSORS)
        tensors.update(zip((_TENSORS[index] for index in self.given), self.inputs, strict=True))
        queries, cache = tensors["queries"], tensors["key_cache"]
        name = name_function(queries.get_dtype(), cache.get_dtype())
        declare(wrapper, f"{name}({_ARGUMENTS})")
        rows, tokens, heads, head_dim = queries.get_size()
        _, kv_heads, block_tokens, _ = cache.get_size()
        has_masks = tensors["tree_mask"] is not None and len(tensors["tree_mask"].get_size()) == 3
        window, soft_cap = self.options.get("window", 0), self.options.get("soft_cap", 0.0)
        # In the order of `_ARGUMENTS`.
        arguments = [
            f"{self.get_name()}.data_ptr()",
            *(point(tensors[name]) for name in _TENSORS),
            *(rows, tokens, heads, kv_heads, head_dim, block_tokens, tensors["block_table"].get_size()[1]),
            *(_find_token_stride(tensors[name]) for name in ("queries", "keys", "values")),
            tokens * tokens if has_masks else 0,
            *(self.options["scale"], window, soft_cap),
        ]
        wrapper.writeline(f"{name}({', '.join(map(str, arguments))});")


def _find_token_stride(tensor: Any) -> int | None:
    """Returns the distance of successive tokens in [rows, tokens, heads, head_dim]; None if it is not the same for all
    tokens, or a token's heads are not dense.
    """
    (rows, tokens, heads, head_dim), strides = tensor.get_size(), tensor.get_stride()
    stride: int = strides[1] if tokens > 1 else strides[0] if rows > 1 else heads * head_dim
    is_dense = strides[3] == 1 and (heads == 1 or strides[2] == head_dim)
    return stride if is_dense and (rows == 1 or strides[0] == tokens * stride) else None


def _realize(tensor: Any, *, may_be_slice: bool) -> Any:
    realized = ir.ExternKernel.realize_input(tensor)
    if may_be_slice and isinstance(realized, ir.ReinterpretView) and _find_token_stride(realized) is not None:
        return realized
    return make_contiguous(realized)


@register_lowering(torch.ops.kiln.attend_in_place.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_attend(*tensors: Any, **options: Any) -> Any:
    given = [index for index, tensor in enumerate(tensors) if tensor is not None]
    # Queries, keys and values may be slices of one projection.
    inputs = [_realize(tensors[index], may_be_slice=index < _CACHES.start) for index in given]
    queries = inputs[0]
    layout = lay_out(queries, queries.get_size())
    call = _AttendCall(layout=layout, inputs=inputs, op_overload=torch.ops.kiln.attend_in_place.default)
    call.given, call.options = given, options
    call.mutation_outputs = [
        ir.MutationOutput(ir.NoneLayout(device=queries.get_device()), cache, call) for cache in inputs[_CACHES]
    ]
    return ir.TensorBox.create(call)
