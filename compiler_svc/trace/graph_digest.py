"""The digest of a graph, which covers what the graph computes but not how it was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from bundle.digest import sha256_bytes


def digest_graph(program: ExportedProgram) -> str:
    """Hashes a canonical text of a graph.

    Returns:
        `sha256:` and 64 hexadecimal digits.
    """
    return sha256_bytes(render_graph(program).encode())


def render_graph(program: ExportedProgram) -> str:
    """Renders a graph as canonical text: one line for each operation, values numbered in their order.

    The text contains operations, constants, shapes, strides, dtypes, and which input is which parameter. It leaves out
    names of values, source lines, module paths and the order of dictionaries.
    """
    numbers: dict[Node, str] = {}
    lines = []
    sources = iter(program.graph_signature.input_specs)
    for node in program.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            source = next(sources)
            operation = "input" if source.kind == InputKind.USER_INPUT else f"{source.kind.name} {source.target}"
        elif node.op == "call_function":
            arguments = [render_argument(argument, numbers) for argument in node.args]
            arguments += [f"{key}={render_argument(value, numbers)}" for key, value in sorted(node.kwargs.items())]
            operation = f"{node.target}({', '.join(arguments)})"
        else:
            assert node.op == "output", f"{node.op} in an exported graph"
            operation = f"output {render_argument(node.args, numbers)}"
        lines.append(f"{numbers[node]} = {operation} : {render_value(node.meta.get('val'))}")
    return "\n".join(lines) + "\n"


def render_argument(argument: Any, numbers: Mapping[Node, str]) -> str:
    """Renders an operation's argument as text; `numbers` has the names of other operations' values."""
    match argument:
        case Node():
            return numbers[argument]
        case list() | tuple():
            return f"[{', '.join(render_argument(item, numbers) for item in argument)}]"
        case None | bool() | int() | float() | str():
            return repr(argument)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(argument)
    raise AssertionError(f"{type(argument).__name__} in an exported graph")


def render_value(value: Any) -> str:
    """Renders dtype, shape and strides of a node's value, or of each item of a sequence; empty if it has no value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(render_value, value))}]"
    return repr(value) if isinstance(value, bool | int | float) else ""
