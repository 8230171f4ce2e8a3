"""Runs exported programs operator by operator, without compiled code.

Programs are functional and their executor owns the state: it passes the state in and keeps the new state that comes
out. A device whose executables cannot write host memory works alike, so this tests that the interface fits both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

import execution.adapters  # programs that call these operators are loaded here
import execution.attention.operators
import execution.collectives.operators
import execution.quantized_linear  # noqa: F401
from bundle.host.shortage import find_shortage
from bundle.manifest import Executable, Manifest
from execution.errors import ExecutableInvalid, StepFailed
from execution.executors.executor import Executor
from execution.executors.host import HostExecutor
from execution.executors.program_file import read_program


def load_eager_executor(
    manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
) -> Executor:
    """Loads a rank; see `execution.executors.executor.load_executor`."""
    return HostExecutor(manifest, rank, blob_path, on_loaded, EagerProgram)


class EagerProgram:
    """See `execution.executors.host.HostProgram`. The graph takes its constants before its inputs."""

    def __init__(self, executable: Executable, path: Path) -> None:
        try:
            program = read_program(path)
        except Exception as error:
            # torch raises too many kinds of exceptions for a file that is not a program to list them.
            kind = type(error).__name__
            detail = f"it is no exported program that can be read ({kind}); the log of its rank says why"
            raise find_shortage(error) or ExecutableInvalid(executable.tag, detail) from error
        signature = program.graph_signature
        expected = (len(executable.inputs) + len(executable.state), len(executable.outputs) + len(executable.state))
        got = (len(signature.user_inputs), len(signature.user_outputs))
        if got != expected:
            detail = f"it takes {got[0]} and returns {got[1]} tensors, the manifest has {expected}"
            raise ExecutableInvalid(executable.tag, detail)
        self._tag = executable.tag
        self._names = [
            spec.target for spec in signature.input_specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        ]
        self._graph: GraphModule = program.graph_module
        self._constants: list[Tensor] = []
        self._staged: list[Tensor] = []

    def stage_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Stages the tensors in the order in which the graph takes them."""
        for name in self._names:
            if name not in constants:
                raise ExecutableInvalid(self._tag, f"constant {name} is bound to no weight")
        self._staged = [constants[name] for name in self._names if name is not None]

    def discard_staged(self) -> None:
        """Releases staged constants."""
        self._staged = []

    def swap_constants(self) -> None:
        """Exchanges the staged constants and those in use."""
        self._constants, self._staged = self._staged, self._constants

    @torch.no_grad()
    def run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the graph once on inputs and state in calling order."""
        try:
            results: Sequence[Tensor] = self._graph(*self._constants, *arguments)
        except (RuntimeError, IndexError) as error:
            raise StepFailed(self._tag) from error
        return results

    def close(self) -> None:
        """Releases the constants."""
        self._constants, self._staged = [], []
