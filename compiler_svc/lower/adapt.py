"""`kiln::adapt`: adds what LoRA adapters change, with a kernel of our own. See kernels/adapt.cpp.

Graphs of torch's operators would read the matrices of every row's adapter, and compute rows that have none. Where the
layer itself is a part of a call of `kiln::linear`, the kernel adds to that call's outputs in place, for all parts at
once: rows without an adapter take no time then, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
from compiler_svc.lower.kernel_calls import declare, join_pointers, join_sizes, lay_out, make_contiguous, point
from compiler_svc.lower.linear import TYPES, LinearCall, linear
from execution.adapters import add_adapters

_ARGUMENTS: Final = (
    "void* out, int64_t out_stride, const void* rows, const void* const* a, const void* const* b, "
    "const int64_t* outputs, const int64_t* firsts, int64_t count, const int32_t* slots, int64_t sequences, "
    "int64_t tokens, int64_t inputs, int64_t rank, const int32_t* live, int64_t groups"
)
_ADAPTED_LINEAR: Final = (
    "adapted_linear(Tensor activations, Tensor[] weights, Tensor[] scales, Tensor? live_rows, *, Tensor adapter_ids, "
    "Tensor[] a, Tensor[] b, int[] firsts) -> Tensor"
)
_ADAPT: Final = torch.ops.kiln.adapt.default
_ADD: Final = torch.ops.aten.add.Tensor


@torch.library.custom_op("kiln::adapt_live", mutates_args=())
def adapt_live(rows: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, live_rows: Tensor | None = None) -> Tensor:  # noqa: ARG001 - a hint
    """Computes `kiln::adapt`. Compiled code does not round A x, and returns zeros in rows that are not live.
    `live_rows` is as `kiln::linear` takes it.
    """
    return add_adapters(rows, a, b, adapter_ids)


@adapt_live.register_fake
def _(rows: Tensor, _a: Tensor, b: Tensor, _adapter_ids: Tensor, _live_rows: Tensor | None = None) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], b.shape[1]))


def add_to_linear(
    activations: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    live_rows: Tensor | None,
    *,
    adapter_ids: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    firsts: Sequence[int],
) -> Tensor:
    """Computes `kiln::adapted_linear`: `kiln::linear` of the first arguments, and `kiln::adapt` of each pair of `a` and
    `b`, added to the outputs from one of `firsts` on. Compiled code rounds the sum alone, not A x and B (A x).
    """
    outputs: Tensor = linear(activations, weights, scales, live_rows)
    for first, one, other in zip(firsts, a, b, strict=True):
        added = add_adapters(activations, one, other, adapter_ids)
        outputs[..., first : first + added.shape[-1]] += added
    return outputs


def _fake(activations: Tensor, weights: Sequence[Tensor], *_: object, **__: object) -> Tensor:
    return activations.new_empty((*activations.shape[:-1], sum(weight.shape[0] for weight in weights)))


_LIBRARY: Final = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(_ADAPTED_LINEAR, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides))  # type: ignore[no-untyped-call]
_LIBRARY.impl("adapted_linear", add_to_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kiln::adapted_linear", _fake, lib=_LIBRARY)


def use_adapt_kernel(module: GraphModule, live_rows: Mapping[int, Node]) -> set[torch.dtype]:
    """Replaces `kiln::adapt` in a graph whose layers call `kiln::linear`: adapters of these layers become a part of the
    call, others call `kiln::adapt_live`. Returns the dtypes of all calls.

    `live_rows` is as `use_linear_kernel` takes it.
    """
    graph = module.graph
    calls = graph.find_nodes(op="call_function", target=_ADAPT)
    dtypes = {call.meta["val"].dtype for call in calls}
    if calls:
        for layers in graph.find_nodes(op="call_function", target=torch.ops.kiln.linear.default):
            activations, weights, *_ = _arguments(layers)
            outputs = _Outputs(layers, 0, sum(weight.meta["val"].shape[0] for weight in weights))
            _join(layers, list(_find_adapters(outputs, activations)))
    for call in graph.find_nodes(op="call_function", target=_ADAPT):
        live = live_rows.get(_arguments(call)[0].meta["val"].shape[:-1].numel())
        call.target, call.args = torch.ops.kiln.adapt_live.default, (*call.args, live)
    graph.lint()
    module.recompile()
    return dtypes


@dataclass(frozen=True, slots=True)
class _Outputs:
    """A value of a graph that has outputs [first, end) of a call of `kiln::linear`, with or without a bias."""

    value: Node
    first: int
    end: int

    def list_parts(self) -> list[_Outputs]:
        """Values that have some of these outputs each, if nothing else reads them."""
        parts: list[_Outputs] = []
        for user in self.value.users:
            args = _arguments(user)
            if user.target is torch.ops.aten.slice.Tensor and args[1] == -1 and len(args) == 4:
                begin, end = args[2:]
                if min(begin, end) < 0:
                    return []
                parts.append(_Outputs(user, self.first + begin, min(self.first + end, self.end)))
            elif user.target is torch.ops.aten.tensor_split.indices and args[2:] == (-1,):
                bounds = [self.first, *(self.first + cut for cut in args[1]), self.end]
                places = ((item, _arguments(item)[1]) for item in user.users)
                parts += [_Outputs(item, bounds[place], bounds[place + 1]) for item, place in places]
            else:
                return []
        parts.sort(key=lambda part: part.first)
        is_divided = all(one.end <= other.first for one, other in pairwise(parts))
        return parts if is_divided else []


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What an adapter adds to outputs from `first` on: `added` is the sum of `outputs` and of `call`."""

    call: Node
    outputs: Node
    added: Node
    first: int

    @property
    def sharing(self) -> tuple[Node, int]:
        """What adapters of one call have in common: the slots of rows, and the rank."""
        _, a, _, adapter_ids = _arguments(self.call)
        return adapter_ids, a.meta["val"].shape[1]


def _find_adapters(outputs: _Outputs, activations: Node) -> Iterator[_Adapter]:
    """Finds what the graph adds to outputs of layers of the same activations, and to nothing else."""
    value, users = outputs.value, list(outputs.value.users)
    is_added = len(users) == 1 and users[0].target is _ADD and not users[0].kwargs
    terms = [one for one in users[0].args if one is not value] if is_added else []
    if len(terms) != 1:
        for part in outputs.list_parts():
            yield from _find_adapters(part, activations)
        return
    (added,), (term,) = users, terms
    if not isinstance(term, Node) or term.target is not _ADAPT:
        yield from _find_adapters(replace(outputs, value=added), activations)
    elif len(term.users) == 1 and _arguments(term)[0] is activations and _is_stored(term):
        yield _Adapter(term, value, added, outputs.first)


def _is_stored(call: Node) -> bool:
    """Whether A, B and slots exist before any layer."""
    return all(one.op in {"get_attr", "placeholder"} for one in _arguments(call)[1:])


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _join(layers: Node, adapters: Sequence[_Adapter]) -> None:
    joined = [one for one in adapters if one.sharing == adapters[0].sharing]
    if not joined:
        return
    _, a, b, _ = zip(*(_arguments(one.call) for one in joined), strict=True)
    adapter_ids, _ = joined[0].sharing
    layers.target = torch.ops.kiln.adapted_linear.default
    layers.kwargs = {"adapter_ids": adapter_ids, "a": a, "b": b, "firsts": [one.first for one in joined]}
    for one in joined:
        one.added.replace_all_uses_with(one.outputs)
        layers.graph.erase_node(one.added)
        layers.graph.erase_node(one.call)


def compile_adapt_kernel(job: LoweringJob, dtype: torch.dtype) -> Path:
    """Compiles the object that libraries with calls of `kiln::adapt` in a dtype link with. Valid inside `steered`."""
    return compile_once(job, name_function(dtype), write_kernel_source(dtype))


def compile_adapt_kernels(job: LoweringJob) -> None:
    """Does the same for the dtypes of most models."""
    for dtype in (torch.float32, torch.bfloat16):
        compile_adapt_kernel(job, dtype)


def write_kernel_source(dtype: torch.dtype) -> str:
    """Returns the kernel's source as one text, with the function for a dtype."""
    call = (
        f"kiln::adapt<{TYPES[dtype]}>(\n      out, out_stride, rows, a, b, outputs, firsts, count, slots, sequences, "
        "tokens, inputs, rank, live, groups);"
    )
    return f'{read_kernel("adapt.cpp")}extern "C" void {_entry(dtype)} {{\n  {call}\n}}\n'


def name_function(dtype: torch.dtype) -> str:
    """Names the kernel's function for a dtype."""
    return f"kiln_adapt_{str(dtype).removeprefix('torch.')}"


def _entry(dtype: torch.dtype) -> str:
    return f"{name_function(dtype)}({_ARGUMENTS})"


@dataclass(frozen=True, slots=True)
class _Operands:
    """What a call of the kernel reads beside rows: their slots, how many are live, and of each layer A, B and its first
    output.
    """

    slots: Any
    live: Any
    a: Sequence[Any]
    b: Sequence[Any]
    firsts: Sequence[int]

    def write_call(self, wrapper: PythonWrapperCodegen, out: Any, rows: Any) -> None:
        """Writes the call, which adds to `out`."""
        dtype = rows.get_dtype()
        declare(wrapper, _entry(dtype))
        *leading, inputs = rows.get_size()
        sequences, rank = self.slots.get_size()[0], self.a[0].get_size()[1]
        tokens = torch.Size(leading).numel() // sequences
        wrapper.writelines(
            [
                "{",
                f"    const void* const a[] = {{{join_pointers(self.a)}}};",
                f"    const void* const b[] = {{{join_pointers(self.b)}}};",
                f"    const int64_t outputs[] = {{{join_sizes(self.b, 1)}}};",
                f"    const int64_t firsts[] = {{{', '.join(map(str, self.firsts))}}};",
                f"    const void* rows = {point(rows)};",
                f"    const int32_t* slots = {point(self.slots)};",
                f"    const int32_t* live = {point(self.live)};",
                f"    {name_function(dtype)}({out.get_name()}.data_ptr(), {out.get_size()[-1]}, rows, a, b, outputs,",
                f"        firsts, {len(self.a)}, slots, {sequences}, {tokens}, {inputs}, {rank}, live,",
                f"        {1 if self.live is None else self.live.get_size()[0]});",
                "}",
            ]
        )


class _AdaptCall(ir.ExternKernelOut):  # type: ignore[misc]
    """A call of the kernel in the generated code. Inputs: rows, A, B, slots, and perhaps numbers of live rows."""

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        rows, a, b, slots, *live = self.inputs
        size_bytes = torch.Size(self.get_size()).numel() * self.get_dtype().itemsize
        wrapper.writeline(f"std::memset({self.get_name()}.data_ptr(), 0, {size_bytes});")
        _Operands(slots, live[0] if live else None, [a], [b], [0]).write_call(wrapper, self, rows)


class _AdaptedLinearCall(LinearCall):
    """Calls of both kernels in the generated code. Inputs: those of the linear layers, slots, all A, all B. Its
    constant arguments: the numbers of weights and of scales, and the first output of each A and B.
    """

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        num_weights, num_scales, *firsts = self.constant_args
        count = len(firsts)
        *own, slots = self.inputs[: -2 * count]
        self.multiply(wrapper, own, num_weights, num_scales)
        live = own[1 + num_weights + num_scales :]
        a, b = self.inputs[-2 * count : -count], self.inputs[-count:]
        _Operands(slots, live[0] if live else None, a, b, firsts).write_call(wrapper, self, own[0])


@register_lowering(torch.ops.kiln.adapt_live.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_adapt(rows: Any, a: Any, b: Any, slots: Any, live_rows: Any = None) -> Any:
    inputs = [make_contiguous(one) for one in (rows, a, b, slots, *([] if live_rows is None else [live_rows]))]
    layout = lay_out(inputs[0], [*inputs[0].get_size()[:-1], inputs[2].get_size()[1]])
    op = torch.ops.kiln.adapt_live.default
    return ir.TensorBox.create(_AdaptCall(layout=layout, inputs=inputs, constant_args=(), op_overload=op))


@register_lowering(torch.ops.kiln.adapted_linear.default, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_adapted_linear(
    *operands: Any, adapter_ids: Any, a: Sequence[Any], b: Sequence[Any], firsts: Sequence[int]
) -> Any:
    op = torch.ops.kiln.adapted_linear.default
    return _AdaptedLinearCall.of(op, *operands, others=(adapter_ids, *a, *b), constants=firsts)
