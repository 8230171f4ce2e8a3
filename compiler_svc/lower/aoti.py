"""Optimization levels 1 and 2: AOTInductor makes a shared library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aot_compile
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from compiler_svc.lower.adapt import compile_adapt_kernel, use_adapt_kernel
from compiler_svc.lower.attend import compile_attend_kernel, use_attend_kernel
from compiler_svc.lower.common_objects import compile_interface
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.inductor import link_with, steered
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.layer_function import prepare_layer
from compiler_svc.lower.linear import compile_linear_kernel, use_linear_kernel
from compiler_svc.lower.live_logits import guard_indices, limit_candidates
from compiler_svc.lower.live_rows import find_live_rows, limited_loops
from compiler_svc.lower.program import example_inputs, load_program
from compiler_svc.lower.repeated_layers import outline_layers
from compiler_svc.lower.top import compile_top_kernel, use_top_kernel
from execution.executors.aoti_library import AotiLibrary
from targets.cpu import AOTI


def lower_program(job: LoweringJob) -> LoweredExecutable:
    """Compiles a program into a library without weights that updates its state in place. Needs a C++ compiler. For the
    program's weights it reserves address space but uses no memory.
    """
    program = load_program(job.program_path)
    inputs = example_inputs(program)
    with torch.no_grad(), steered(job) as options:
        module = write_in_place(program, job.num_state)
        objects = [compile_interface(job)]
        live_rows = find_live_rows(module, job.live)
        linear_pairs = use_linear_kernel(module, live_rows)
        objects += [compile_linear_kernel(job, pair) for pair in sorted(linear_pairs, key=str)]
        objects += [compile_adapt_kernel(job, dtype) for dtype in sorted(use_adapt_kernel(module, live_rows), key=str)]
        if use_top_kernel(module, live_rows):
            objects.append(compile_top_kernel(job))
            limit_candidates(module, None if job.live is None else job.live.picked, live_rows)
        guarded = guard_indices(module, live_rows)
        objects += [compile_attend_kernel(job, pair) for pair in sorted(use_attend_kernel(module), key=str)]
        link_with(job, objects)
        for name, layer in outline_layers(module).items():
            prepare_layer(name, layer)
        with limited_loops(module, job.live, guarded=guarded):
            path = Path(aot_compile(module, inputs, options=options))
    constants = tuple(constant.name for constant in AotiLibrary(path).constants)
    check_constants(constants, job.constants)
    return LoweredExecutable(
        tag=job.tag, path=path, format=AOTI.name, state_convention=AOTI.state_convention, constants=constants
    )


def check_constants(wanted: tuple[str, ...], available: tuple[str, ...]) -> None:
    """Checks that every constant that a library needs exists; without one, the library would crash."""
    for name in wanted:
        if name not in available:
            raise ProgramUnsupported(f"constant {name!r}", "appeared in compilation and is in no weight set")


def write_in_place(program: ExportedProgram, num_state: int) -> GraphModule:
    """Makes a module of a functional program that writes its state in place and returns its outputs alone. The
    program's last `num_state` inputs are its state, its last `num_state` outputs the new state.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    results: Sequence[Any] = output.args[0]
    state = graph.find_nodes(op="placeholder")[-num_state:] if num_state else []
    new_state = results[len(results) - num_state :]
    output.args = (tuple(results[: len(results) - num_state]),)
    with graph.inserting_before(output):
        for old, new in zip(state, new_state, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (old, new))
    # The program's own code would put the results into the form of all results, those that are state included.
    graph.set_codegen(CodeGen())
    graph.lint()
    module.recompile()
    return module
