"""Runs exported programs operator by operator, with no compiled code.

Programs are functional and this executor owns the state: it hands the state in and keeps what comes out. So it is the
shape of a device whose executables cannot write into host memory, and keeps the interface honest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

import execution.collectives.operators  # noqa: F401 - programs that call its operators are loaded here
from bundle.manifest import Executable, Manifest
from execution.errors import ExecutableInvalid, StepFailed, WeightsAwaited
from execution.executors.arguments import StepArguments, order_constants
from execution.executors.program_file import read_program
from execution.executors.state import RankState
from execution.executors.weights import RankWeights


class EagerExecutor:
    """See `execution.executors.executor.Executor`."""

    def __init__(
        self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
    ) -> None:
        """Loads; see `execution.executors.executor.load_executor`."""
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._arguments = StepArguments(manifest)
        self._weights = RankWeights(manifest, rank, blob_path)
        self._state = RankState(manifest.state)
        on_loaded("weights")
        self._programs: dict[str, _Program] = {}
        for tag, executable in self._executables.items():
            self._programs[tag] = _Program(executable, blob_path(executable.blob))
            on_loaded(tag)
        self._constants = self._bind(self._weights.active) if self._weights.is_complete else {}

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in use."""
        return self._weights.size_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._state.size_bytes

    @torch.no_grad()
    def run(self, tag: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs one executable once."""
        executable = self._arguments.executable(tag)
        arguments = self._arguments.order(executable, inputs)
        if not self._weights.is_complete:
            raise WeightsAwaited
        arguments += [self._state.tensors[name] for name in executable.state]
        try:
            results = self._programs[tag].graph(*self._constants[tag], *arguments)
        except (RuntimeError, IndexError) as error:
            raise StepFailed(tag, str(error)) from error
        num_outputs = len(executable.outputs)
        self._state.tensors.update(zip(executable.state, results[num_outputs:], strict=True))
        return {spec.name: output for spec, output in zip(executable.outputs, results[:num_outputs], strict=True)}

    def stage_weights(self, path: Path) -> None:
        """Maps other weights beside the ones in use."""
        self._weights.stage(path)

    def swap_weights(self) -> None:
        """Puts the staged weights in use."""
        self._weights.swap()
        self._constants = self._bind(self._weights.active)

    def discard_staged(self) -> None:
        """Lets go of staged weights."""
        self._weights.discard_staged()

    def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes slots; returns the bytes written."""
        return self._state.zero(slots)

    def read_state(self, name: str) -> Tensor:
        """A copy of one state tensor."""
        return self._state.tensors[name].clone()

    def close(self) -> None:
        """Lets go of weights, state and executables."""
        self._programs.clear()
        self._constants.clear()
        self._weights.close()
        self._state.tensors.clear()

    def _bind(self, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
        return {
            tag: program.order_constants(order_constants(self._executables[tag], weights))
            for tag, program in self._programs.items()
        }


class _Program:
    """The graph of an exported program, which takes its constants before its inputs."""

    def __init__(self, executable: Executable, path: Path) -> None:
        try:
            program = read_program(path)
        except Exception as error:
            # Whatever torch meets in a file that is no program: the causes are too many to name.
            raise ExecutableInvalid(executable.tag, f"{type(error).__name__}: {error}") from error
        signature = program.graph_signature
        expected = (len(executable.inputs) + len(executable.state), len(executable.outputs) + len(executable.state))
        got = (len(signature.user_inputs), len(signature.user_outputs))
        if got != expected:
            detail = f"it takes {got[0]} and returns {got[1]} tensors, the manifest has {expected}"
            raise ExecutableInvalid(executable.tag, detail)
        self._tag = executable.tag
        self._constants = [
            spec.target for spec in signature.input_specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        ]
        self.graph: GraphModule = program.graph_module

    def order_constants(self, constants: Mapping[str, Tensor]) -> list[Tensor]:
        for name in self._constants:
            if name not in constants:
                raise ExecutableInvalid(self._tag, f"constant {name} is bound to no weight")
        return [constants[name] for name in self._constants if name is not None]
