"""Optimization levels 1 and 2: a shared library made by AOTInductor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor import aot_compile

from compiler_svc.lower.adapters import InPlaceProgram
from compiler_svc.lower.common_objects import compile_interface
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.inductor import link_with, steered
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.linear import compile_linear_kernel, use_linear_kernel
from compiler_svc.lower.program import example_inputs, load_program
from execution.aoti_library import AotiLibrary


class AotiBackend:
    """Compiles a program, with its state written in place, into a library without weights."""

    def lower(self, job: LoweringJob) -> LoweredExecutable:
        """Compiles; needs a C++ compiler and, for the program's weights, address space but no memory.

        Raises:
            ProgramUnsupported: The library wants a constant that the program does not have.
            ToolchainMissing: There is no C++ compiler.
        """
        program = load_program(job.program_path)
        inputs = example_inputs(program)
        with torch.no_grad(), steered(job) as options:
            in_place = torch.export.export(InPlaceProgram(program, job.num_state), inputs)
            module = in_place.module(check_guards=False)
            objects = [compile_interface(job)]
            if use_linear_kernel(module):
                objects.append(compile_linear_kernel(job))
            link_with(job, objects)
            path = Path(aot_compile(module, inputs, options=options))
        constants = tuple(constant.name for constant in AotiLibrary(path).constants)
        check_constants(constants, job.constants)
        return LoweredExecutable(
            tag=job.tag, path=path, format="aoti", state_convention="in_place", constants=constants
        )


def check_constants(wanted: tuple[str, ...], available: tuple[str, ...]) -> None:
    """Checks that a library can be given all that it wants; it would crash without.

    Raises:
        ProgramUnsupported: It wants a constant that the program does not have.
    """
    for name in wanted:
        if name not in available:
            raise ProgramUnsupported(f"constant {name!r}", "appeared in compilation and is in no weight set")
