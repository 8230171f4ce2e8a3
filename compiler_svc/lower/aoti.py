"""Optimization levels 1 and 2: AOTInductor makes a shared library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor import aot_compile

from compiler_svc.lower.attend import compile_attend_kernel, use_attend_kernel
from compiler_svc.lower.common_objects import compile_interface
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.in_place import write_in_place
from compiler_svc.lower.inductor import link_with, steered
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.layer_function import prepare_layer
from compiler_svc.lower.linear import compile_linear_kernel, use_linear_kernel
from compiler_svc.lower.live_logits import guard_indices
from compiler_svc.lower.live_rows import find_live_rows, limited_loops
from compiler_svc.lower.program import example_inputs, load_program
from compiler_svc.lower.repeated_layers import outline_layers
from compiler_svc.lower.top import compile_top_kernel, use_top_kernel
from execution.executors.aoti_library import AotiLibrary
from targets.cpu import AOTI


def lower_program(job: LoweringJob) -> LoweredExecutable:
    """Compiles a program into a library without weights that updates its state in place.

    Needs a C++ compiler. For the program's weights it reserves address space but uses no memory.

    Raises:
        ProgramUnsupported: The library needs a constant that the program does not have.
        ToolchainMissing: This host has no C++ compiler.
    """
    program = load_program(job.program_path)
    inputs = example_inputs(program)
    with torch.no_grad(), steered(job) as options:
        module = write_in_place(program, job.num_state)
        objects = [compile_interface(job)]
        live_rows = find_live_rows(module, job.live)
        if use_linear_kernel(module, job.options.target.isa, live_rows):
            objects.append(compile_linear_kernel(job))
        if use_top_kernel(module, live_rows):
            objects.append(compile_top_kernel(job))
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
    """Checks that every constant that a library needs exists; without one, the library would crash.

    Raises:
        ProgramUnsupported: The library needs a constant that the program does not have.
    """
    for name in wanted:
        if name not in available:
            raise ProgramUnsupported(f"constant {name!r}", "appeared in compilation and is in no weight set")
