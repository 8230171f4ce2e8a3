"""Exported programs without their weights: the input of a lowering, and the executables of -O0.

A file holds the graph and, for every parameter and buffer, an empty tensor of the right dtype. It holds no weights, no
example inputs and no source locations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch._export.serde import serialize
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

import execution.adapters  # programs that call these operators are loaded here
import execution.attention.operators
import execution.collectives.operators  # noqa: F401
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.job import LiveInputs, LoweredExecutable, LoweringJob, LoweringOptions, NeuronSubmodel
from execution.executors.program_file import read_program
from targets.cpu import EXPORTED_PROGRAM

_CONSTANT_KINDS: Final = (InputKind.PARAMETER, InputKind.BUFFER)
_COLLECTIVES: Final = (torch.ops.kiln.all_reduce.default, torch.ops.kiln.all_gather.default)
#: Metadata of a node that files keep; the rest says which source line the node came from.
_KEPT_METADATA: Final = ("val", "tensor_meta")


def constant_names(program: ExportedProgram) -> tuple[str, ...]:
    """Names of the tensors that the program needs: its parameters and persistent buffers, in its own order."""
    names = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        name = spec.target or spec.arg.name
        if spec.kind not in _CONSTANT_KINDS or spec.persistent is False:
            kind = spec.kind.name.lower().replace("_", " ")
            raise ProgramUnsupported(
                f"{kind} {name!r}", "is data of the graph's own: make it a parameter or a persistent buffer"
            )
        names.append(name)
    for output in program.graph_signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            raise ProgramUnsupported(
                f"output {output.arg.name!r}", f"is a {output.kind.name.lower()}: state must be returned, not written"
            )
    return tuple(names)


def placeholders(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Makes a tensor without memory for each constant and input of the graph, by its name there."""
    return {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}


def save_program(program: ExportedProgram, path: Path) -> None:
    """Writes a program without its weights. Equal graphs give equal bytes."""
    empty = {name: _hold(torch.empty(0, dtype=tensor.dtype)) for name, tensor in program.state_dict.items()}
    # If torch got a path, it would write the file's name into the file.
    with path.open("wb") as file, _without_self_test():
        torch.export.save(_with_weights(program, empty), file)


@contextmanager
def _without_self_test() -> Iterator[None]:
    """Keeps torch from testing whether it can put a copy of the written program into a canonical order. The test has no
    effect and takes two thirds of the time of writing.
    """
    test = vars(serialize)["canonicalize"]
    vars(serialize)["canonicalize"] = lambda *_: None
    try:
        yield
    finally:
        vars(serialize)["canonicalize"] = test


def load_program(path: Path) -> ExportedProgram:
    """Reads a program and gives it uninitialized weights of the right shapes, without touching their memory."""
    program = read_program(path)
    shapes = placeholders(program)
    weights = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in _CONSTANT_KINDS and spec.target is not None:
            like = shapes[spec.arg.name]
            weights[spec.target] = _hold(torch.empty(like.shape, dtype=like.dtype))
    return _with_weights(program, weights)


def example_inputs(program: ExportedProgram) -> tuple[torch.Tensor, ...]:
    """Makes uninitialized inputs and state in the program's shapes."""
    shapes = placeholders(program)
    like = [shapes[name] for name in program.graph_signature.user_inputs]
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like)


def _hold(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _with_weights(program: ExportedProgram, weights: dict[str, torch.nn.Parameter]) -> ExportedProgram:
    graph_module = copy.deepcopy(program.graph_module)
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {key: node.meta[key] for key in _KEPT_METADATA if key in node.meta}
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=program.graph_signature,
        state_dict=dict(weights),
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=None,
        constants={},
        verifiers=program.verifiers,
    )


def stage_job(
    program: ExportedProgram,
    *,
    tag: str,
    num_state: int,
    options: LoweringOptions,
    directory: Path,
    cache_dir: Path,
    live: LiveInputs | None = None,
    neuron: NeuronSubmodel | None = None,
) -> LoweringJob:
    """Writes a program, without its weights, and a job for it. Creates both directories.

    Args:
        program: A functional program: its last `num_state` inputs are the state, its last `num_state` outputs the new
            state. Only names, shapes and dtypes of its weights count; they may be fake or uninitialized.
        directory: Directory of this job alone, whereas all jobs share `cache_dir`.
        neuron: The same submodel for Neuron's lowering, which takes no program: none is written then.
    """
    job = LoweringJob(
        tag=tag,
        directory=directory.resolve(),
        cache_dir=cache_dir.resolve(),
        num_state=num_state,
        constants=constant_names(program),
        reserved_bytes=sum(tensor.nbytes for tensor in placeholders(program).values()),
        options=options,
        live=live,
        has_collectives=any(program.graph.find_nodes(op="call_function", target=operator) for operator in _COLLECTIVES),
        neuron=neuron,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    job.cache_dir.mkdir(parents=True, exist_ok=True)
    if neuron is None:
        save_program(program, job.program_path)
    return job


def keep_program(job: LoweringJob) -> LoweredExecutable:
    """Returns the staged program as the executable."""
    return LoweredExecutable(
        tag=job.tag,
        path=job.program_path,
        format=EXPORTED_PROGRAM.name,
        state_convention=EXPORTED_PROGRAM.state_convention,
        constants=job.constants,
    )
