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
from compiler_svc.lower.program import example_inputs, load_program
from compiler_svc.lower.repeated_layers import outline_layers
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
        if use_linear_kernel(module, job.options.target.isa):
            objects.append(compile_linear_kernel(job))
        objects += [compile_attend_kernel(job, pair) for pair in sorted(use_attend_kernel(module), key=str)]
        link_with(job, objects)
        for name, layer in outline_layers(module).items():
            prepare_layer(name, layer)
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
