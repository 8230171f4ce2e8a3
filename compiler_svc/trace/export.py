"""Exports a submodel to an `ExportedProgram` that touches no weight memory, with its digest and its constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.fx.config
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from bundle.digest import sha256_bytes
from bundle.manifest import ADAPTER_WEIGHTS, MODEL_WEIGHTS, ConstantBinding
from compiler_svc.lower.graph_text import render_argument, render_call, render_value
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.program import build_program, make_example_tensors
from compiler_svc.trace.sources import recorded_sources
from compiler_svc.trace.submodels import ExecutableSpec, list_adapter_tensors


@dataclass(frozen=True)
class TracedSubmodel:
    """A functional graph: callers pass inputs, then state; it returns outputs, then the new state.

    The program's parameters and example inputs are uninitialized CPU tensors: shapes count, values do not. `constants`
    has the weight set's tensor for every parameter of the graph, by the parameter's name there.
    """

    spec: ExecutableSpec
    program: ExportedProgram
    graph_digest: str
    constants: tuple[ConstantBinding, ...]


def export_submodel(
    spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, *, with_sources: bool = False
) -> TracedSubmodel:
    """Exports one submodel. The graph is equal for all ranks.

    Reserves memory for parameters and state without touching it. `with_sources` records each operation's source line,
    which does not change the digest; see `sources.find_source`.
    """
    program = build_program(spec, plan, submodel)
    examples = make_example_tensors(spec, submodel)
    with torch.no_grad(), recorded_sources() if with_sources else _without_stack_traces():
        exported = torch.export.export(program, examples, strict=False)
    weight_sets = dict.fromkeys((one.name for one in plan.tensors), MODEL_WEIGHTS)
    weight_sets |= dict.fromkeys((one.name for one in list_adapter_tensors(spec)), ADAPTER_WEIGHTS)
    return TracedSubmodel(submodel, exported, digest_graph(exported), bind_constants(exported, weight_sets))


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Keeps torch from looking up each operation's source line: they take a third of the time and are dropped."""
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)  # torch 2.9 has no such switch
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def bind_constants(program: ExportedProgram, weight_sets: Mapping[str, str]) -> tuple[ConstantBinding, ...]:
    """Finds the tensor that each constant of a graph takes; `weight_sets` has the set of each tensor.

    If a constant had no tensor, the process that runs the executable would crash instead of raising an error.
    """
    bindings = []
    for source in program.graph_signature.input_specs:
        if source.kind == InputKind.USER_INPUT:
            continue
        assert source.target is not None
        tensor = source.target.removeprefix("core.")
        assert source.kind == InputKind.PARAMETER, f"{source.kind.name} {source.target} is in no weight set"
        assert tensor in weight_sets, f"{source.target} is in no weight set"
        bindings.append(ConstantBinding(name=source.target, weight_set=weight_sets[tensor], tensor=tensor))
    return tuple(bindings)


def digest_graph(program: ExportedProgram) -> str:
    """Hashes a canonical text of a graph."""
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
