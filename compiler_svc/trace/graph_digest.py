"""The digest of a graph, which covers what the graph computes but not how it was traced."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from bundle.digest import sha256_bytes
from compiler_svc.lower.graph_text import render_argument, render_call, render_value


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
            operation = render_call(node, numbers)
        else:
            assert node.op == "output", f"{node.op} in an exported graph"
            operation = f"output {render_argument(node.args, numbers)}"
        lines.append(f"{numbers[node]} = {operation} : {render_value(node.meta.get('val'))}")
    return "\n".join(lines) + "\n"
