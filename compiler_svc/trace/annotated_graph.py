"""A graph as records for people and programs: each operation with the source line that it comes from."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import msgspec
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from compiler_svc.lower.graph_text import render_argument, render_value
from compiler_svc.trace.sources import find_source


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a graph. `docs/api.md` explains the fields.

    Arguments of inputs and parameters are their names in the manifest. Without a submodule, `module` is empty.
    """

    op_type: str
    op_name: str
    arguments: str
    value: str
    module: str
    source_file: str | None
    source_line: int | None


def annotate_graph(program: ExportedProgram, inputs: Sequence[str]) -> Iterator[Operation]:
    """Yields the operations of a graph in order. Equal graphs of equal sources give equal records.

    `inputs` names the program's inputs, then its state. Without `recorded_sources` in its export, there are no lines.
    """
    names: dict[Node, str] = {}
    sources, input_names = iter(program.graph_signature.input_specs), iter(inputs)
    for node in program.graph.nodes:
        names[node] = node.name
        if node.op == "placeholder":
            spec = next(sources)
            if spec.kind == InputKind.USER_INPUT:
                op_type, arguments = "input", next(input_names)
            else:
                op_type, arguments = spec.kind.name.lower(), spec.target or ""
        elif node.op == "output":
            op_type, arguments = "output", render_argument(node.args, names)
        else:
            op_type = "getitem" if node.target is operator.getitem else str(node.target)
            parts = [render_argument(one, names) for one in node.args]
            parts += [f"{name}={render_argument(one, names)}" for name, one in sorted(node.kwargs.items())]
            arguments = ", ".join(parts)
        source = find_source(node)
        yield Operation(
            op_type=op_type,
            op_name=node.name,
            arguments=arguments,
            value=render_value(node.meta.get("val")),
            module=_find_module(node),
            source_file=None if source is None else source.file,
            source_line=None if source is None else source.line,
        )


def _find_module(node: Node) -> str:
    """Path of the innermost module. The stack's entries are (path, class), from the outermost module on."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("core.") if stack else ""
