"""What Kiln's operators become in graphs that torch-xla traces; registered only in a process that lowers for XLA.

`kiln::attend` is its reference, made of torch's operators with masks and gathers of static shapes. `kiln::linear` needs
nothing: graphs get it from the lowering for cpu alone. `kiln::quantized_linear` casts the items, multiplies, and scales
what comes out, as NxD's quantized layers do. `kiln::adapt` gathers the matrices of each row's adapter. `kiln::argmax`
and `kiln::topk` are torch's, which XLA expands into reductions and sorts; a compiler that has its own passes them to
`register_operators`.

torch-xla does not functionalize graphs for Neuron, because torch-neuronx does not let it. Operators of torch that then
give other values, or fail in a way that does not name them, are refused. Comparisons with a number stay in the dtype of
the tensor: torch-xla would make them of 64-bit integers, which neuronx-cc has got wrong before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

import execution.adapters
import execution.candidates
import execution.collectives.operators
import execution.quantized_linear  # noqa: F401 - registers the operators, as those before do
from execution.attention.operators import attend


def all_reduce(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    """The sum of the ranks' tensors; see `execution.collectives.operators`. All ranks are one replica group."""
    if tp_degree == 1:
        return input.clone()
    model = import_module("torch_xla.core.xla_model")
    total: Tensor = model.all_reduce(model.REDUCE_SUM, input, groups=_list_groups(tp_degree), pin_layout=False)
    return total


def all_gather(input: Tensor, tp_degree: int) -> Tensor:  # noqa: A002 - the schema's name
    """The ranks' tensors, joined along the last axis; see `execution.collectives.operators`."""
    if tp_degree == 1:
        return input.clone()
    model = import_module("torch_xla.core.xla_model")
    last = input.dim() - 1
    whole: Tensor = model.all_gather(input, dim=last, groups=_list_groups(tp_degree), pin_layout=False)
    return whole


def _list_groups(tp_degree: int) -> list[list[int]]:
    return [list(range(tp_degree))]


def multiply_quantized(input: Tensor, items: Tensor, scales: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Multiplies […, inputs] by items [outputs, inputs] in the dtype of the input, which has each of their values, and
    the products by scales, float32 [outputs] or [1]; see `execution.quantized_linear`. No formats of groups come here.
    """
    products = functional.linear(input, items.to(input.dtype))
    return (products.to(torch.float32) * scales).to(input.dtype)


def add_adapters(input: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Multiplies each row of [rows, …, inputs] by A and B of its adapter, which are gathered; see `execution.adapters`.
    Rows without one take those of slot 0, and then zeros.
    """
    slots = adapter_ids.clamp(min=0)
    rows = input.reshape(input.shape[0], -1, input.shape[-1])
    reduced = torch.bmm(rows, a.index_select(0, slots).transpose(1, 2))
    added = torch.bmm(reduced, b.index_select(0, slots).transpose(1, 2))
    return torch.where((adapter_ids >= 0)[:, None, None], added, 0.0).view(*input.shape[:-1], b.shape[1])


_OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "quantized_linear": multiply_quantized,
    "adapt": add_adapters,
}

#: Operators of torch, below `aten`, that are right only where torch-xla functionalizes, and what is right everywhere.
REFUSED: Final[Mapping[str, str]] = {
    # `split` with a list of sizes: parts are cut from the items in their order, whatever the axis.
    "split_with_sizes": "tensor_split",
    "view.dtype": "to",
    "diag_embed": "a comparison of indices",
    "block_diag": "cat with zeros",
    "narrow_copy": "narrow",
}


#: Comparisons below `aten`, of a tensor and a number, or of two tensors.
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")


class OperatorRefused(Exception):
    """A module calls an operator that graphs for Neuron cannot have.

    Attributes:
        operator: Its name below `aten`.
        accepted: What may take its place.
    """

    def __init__(self, operator: str, accepted: str) -> None:
        super().__init__(f"aten::{operator} is right only in functionalized graphs; accepted: {accepted}")
        self.operator = operator
        self.accepted = accepted


def _refuse(operator: str, accepted: str) -> Callable[..., NoReturn]:
    def run(*_: object, **__: object) -> NoReturn:
        raise OperatorRefused(operator, accepted)

    return run


def _compare_tensors(name: str) -> Callable[[Tensor, float], Tensor]:
    compare: Callable[[Tensor, Tensor], Tensor] = getattr(torch.ops.aten, name).Tensor

    def run(self: Tensor, other: float) -> Tensor:
        dtype = torch.result_type(self, other)
        return compare(self, torch.full((), other, dtype=dtype, device=self.device))

    return run


@contextmanager
def register_operators(**own: Callable[..., Any]) -> Iterator[None]:
    """Registers operators for tensors of XLA devices, comparisons, and those that raise `OperatorRefused`, until the
    block ends.

    `own` has implementations by the names of operators in `kiln`, in place of those here or of the operator's own. They
    take and give what the operators' schemas say: `argmax(values)` gives int32 places, `topk(values, count)` values and
    int32 places, largest first; which of equal values it takes, and in what order, is open. Both get float32 alone.
    """
    library = torch.library.Library("kiln", "IMPL")  # type: ignore[no-untyped-call]
    torchs = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        # Under the key XLA, slices of a cache would be gathers from it, by tables that the host makes.
        library.impl("attend", attend, "AutogradXLA")  # type: ignore[no-untyped-call]
        for name, run in {**_OPERATORS, **own}.items():
            library.impl(name, run, "XLA")  # type: ignore[no-untyped-call]
        for name, accepted in REFUSED.items():
            torchs.impl(name, _refuse(name, accepted), "XLA")  # type: ignore[no-untyped-call]
        for name in _COMPARISONS:
            torchs.impl(f"{name}.Scalar", _compare_tensors(name), "XLA")  # type: ignore[no-untyped-call]
        yield
    finally:
        for one in (library, torchs):
            one._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to unregister
