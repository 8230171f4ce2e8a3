"""Renders a graph of torch as an HLO module with the same inputs, outputs and shapes, and invented operations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from tests.neuron.hlo_modules import Array, Module, Op

_ELEMENT_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int32: "s32",
    torch.int64: "s64", torch.bool: "pred", torch.complex64: "c64", torch.int8: "s8",
    torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip
#: Opcodes of the operators that the check of graphs looks at.
_OPCODES = {
    "aten.mm": "dot", "aten.bmm": "dot", "aten.sort": "sort", "aten.topk": "sort", "aten.pow": "power",
    "aten.sym_size": "get-dimension-size", "kiln.all_reduce": "all-reduce", "kiln.all_gather": "all-gather",
    "kiln.attend": "scatter", "<built-in function getitem>": "get-tuple-element",
}  # fmt: skip


def render_hlo(graph: Graph, inputs: Sequence[Node], outputs: Sequence[Node], aliases: Mapping[int, int]) -> bytes:
    places: dict[Node, int] = {}
    ops = []
    for node in graph.nodes:
        if node.op == "output" or (node.op == "placeholder" and node not in inputs):
            continue
        places[node] = 101 + len(ops)
        operands = tuple(places[one] for one in node.all_input_nodes if one in places)
        shape = _shape_of(node.meta.get("val"))
        if node.op == "placeholder":
            ops.append(Op("parameter", shape, parameter=list(inputs).index(node)))
        else:
            name = re.sub(r"\.[^.]*$", "", str(node.target))
            source = node.meta.get("source", ("", 0))
            ops.append(Op(_OPCODES.get(name, name), shape, operands=operands, source=source))
    shapes = tuple(_shape_of(node.meta["val"]) for node in outputs)
    ops.append(Op("tuple", shapes, operands=tuple(places[node] for node in outputs)))  # type: ignore[arg-type]
    return Module([ops], aliases=dict(aliases)).encode()


def _shape_of(value: object) -> Array | tuple[Array, ...]:
    if isinstance(value, torch.Tensor):
        return Array(_ELEMENT_TYPES[value.dtype], tuple(int(size) for size in value.shape))
    parts = value if isinstance(value, tuple | list) else ()
    return tuple(_shape_of(part) for part in parts)  # type: ignore[misc]
