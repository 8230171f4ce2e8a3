"""Optimization levels 1 and 2: a shared library made by AOTInductor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch._inductor import aot_compile
from torch.export import ExportedProgram

from compiler_svc.lower.common_objects import compile_interface
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.inductor import link_with, steered
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.linear import compile_linear_kernel, use_linear_kernel
from compiler_svc.lower.program import example_inputs, load_program
from execution.executors.aoti_library import AotiLibrary
from targets.cpu import AOTI


def lower_program(job: LoweringJob) -> LoweredExecutable:
    """Compiles a program, with its state written in place, into a library without weights.

    Needs a C++ compiler and, for the program's weights, address space but no memory.

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
        tag=job.tag, path=path, format=AOTI.name, state_convention=AOTI.state_convention, constants=constants
    )


def check_constants(wanted: tuple[str, ...], available: tuple[str, ...]) -> None:
    """Checks that a library can be given all that it wants; it would crash without.

    Raises:
        ProgramUnsupported: It wants a constant that the program does not have.
    """
    for name in wanted:
        if name not in available:
            raise ProgramUnsupported(f"constant {name!r}", "appeared in compilation and is in no weight set")


class InPlaceProgram(nn.Module):
    """Runs `(inputs, state) -> (outputs, new state)` as `(inputs, state) -> outputs`, writing the state where it lies.

    The compiler turns the final copies into the update itself: a decode step writes the new rows and copies no cache.
    """

    def __init__(self, program: ExportedProgram, num_state: int) -> None:
        """Takes the last `num_state` inputs and outputs of the program to be its state."""
        super().__init__()
        functional = program.module(check_guards=False)
        # Not a child of this module but in its place, sharing its registries: so the constants keep their names.
        for registry in ("_parameters", "_buffers", "_modules"):
            self.__dict__[registry] = functional.__dict__[registry]
        self.__dict__["_functional"] = functional
        self._num_state = num_state

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the program once."""
        results = self.__dict__["_functional"](*arguments)
        state = arguments[len(arguments) - self._num_state :]
        new_state = results[len(results) - self._num_state :]
        for tensor, new in zip(state, new_state, strict=True):
            tensor.copy_(new)
        return tuple(results[: len(results) - self._num_state])
