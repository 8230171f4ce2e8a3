"""The executor of all formats whose executables compute on tensors in host memory.

It maps weights from their files and allocates the state. All executables of the rank share both. An executor of another
device keeps its tensors there and implements `Executor` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from bundle.manifest import Executable, Manifest
from execution.errors import ExecutableInvalid, WeightsAwaited, WeightsNotStaged
from execution.executors.arguments import StepArguments, order_constants
from execution.executors.state import RankState
from execution.executors.weights import RankWeights


class HostProgram(Protocol):
    """One loaded executable, with up to two sets of constants: the one in use and the other one, which is staged.

    Its constants are the weights' own memory. It must not keep a set that is neither staged nor in use.
    """

    def stage_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Stages tensors, by the constants' names. They replace any staged before.

        Raises:
            ExecutableInvalid: A tensor is missing or does not fit.
        """

    def discard_staged(self) -> None:
        """Releases staged constants, if any."""

    def swap_constants(self) -> None:
        """Exchanges the staged constants and those in use, as often as the two sets take turns."""

    def run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Calls the program once with inputs and state in calling order.

        Returns:
            New tensors: the outputs and, if the program is functional, the new state.

        Raises:
            StepFailed: The program raised.
        """

    def close(self) -> None:
        """Releases the executable and its constants."""


#: Loads the executable from a file, or raises ExecutableInvalid.
LoadProgram = Callable[[Executable, Path], HostProgram]


class HostExecutor:
    """See `execution.executors.executor.Executor`."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        blob_path: Callable[[str], Path],
        on_loaded: Callable[[str], None],
        load_program: LoadProgram,
    ) -> None:
        self._arguments = StepArguments(manifest)
        self._weights = RankWeights(manifest, rank, blob_path)
        self._state = RankState(manifest.state)
        on_loaded("weights")
        # By blob: executables of several buckets may be one program.
        self._programs: dict[str, HostProgram] = {}
        self._bound: dict[str, Executable] = {}
        # Blobs of programs that ran with the old weights last. They change over when a step needs the others.
        self._on_old: set[str] = set()
        for executable in manifest.executables:
            first = self._bound.setdefault(executable.blob, executable)
            if first is executable:
                self._programs[executable.blob] = load_program(executable, blob_path(executable.blob))
            elif _convention_of(first) != _convention_of(executable):
                raise ExecutableInvalid(
                    executable.tag, f"it is the program of {first.tag}, but takes or returns others"
                )
            on_loaded(executable.tag)
        if self._weights.is_complete:
            self._stage(self._weights.active)
            self._swap()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in use."""
        return self._weights.size_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._state.size_bytes

    def run(self, tag: str, inputs: Mapping[str, Tensor], *, with_old: bool = False) -> dict[str, Tensor]:
        """Runs one executable once."""
        executable = self._arguments.executable(tag)
        arguments = self._arguments.order(executable, inputs)
        if not self._weights.is_complete:
            # The programs have no constants yet, but compiled ones would read them nevertheless.
            raise WeightsAwaited
        if with_old and self._weights.staged is None:
            raise WeightsNotStaged
        self._select(executable.blob, old=with_old)
        arguments += [self._state.tensors[name] for name in executable.state]
        results = self._programs[executable.blob].run(arguments)
        num_outputs = len(executable.outputs)
        if executable.state_convention == "functional":
            self._state.tensors.update(zip(executable.state, results[num_outputs:], strict=True))
        return {spec.name: output for spec, output in zip(executable.outputs, results[:num_outputs], strict=True)}

    def stage_weights(self, path: Path) -> None:
        """Maps other weights beside those in use."""
        staged = self._weights.stage(path)
        try:
            self._stage(staged)
        except ExecutableInvalid:
            # If one program did not get its constants, no program may swap.
            self.discard_staged()
            raise

    def swap_weights(self, *, keeps_old: bool = False) -> None:
        """Puts the staged weights in use."""
        if self._weights.staged is None:
            raise WeightsNotStaged
        self._select_all()
        self._swap()
        self._weights.swap()
        if not keeps_old:
            self.discard_staged()

    def discard_staged(self) -> None:
        """Releases the weights that are not in use."""
        self._select_all()
        for program in self._programs.values():
            program.discard_staged()
        self._weights.discard_staged()

    def check(self, weight_set: str, index: int, path: Path | None) -> None:
        """Checks a write without writing."""
        self._weights.check(weight_set, index, path)

    def write(self, weight_set: str, index: int, path: Path | None) -> None:
        """Writes one entry of a mutable weight set, or zeroes it."""
        self._weights.write(weight_set, index, path)

    def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes slots, or all for None; returns the bytes written."""
        return self._state.zero(slots)

    def commit_state(self) -> None:
        """Touches every page of the KV cache."""
        self._state.commit()

    def read_state(self, name: str) -> Tensor:
        """A copy of one state tensor."""
        return self._state.tensors[name].clone()

    def close(self) -> None:
        """Releases weights, state and executables."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._weights.close()
        self._state.tensors.clear()

    def _select(self, blob: str, *, old: bool) -> None:
        if (blob in self._on_old) is not old:
            self._programs[blob].swap_constants()
            self._on_old ^= {blob}

    def _select_all(self) -> None:
        """Puts the weights in use into every program."""
        for blob in tuple(self._on_old):
            self._select(blob, old=False)

    def _stage(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._select_all()
        for blob, program in self._programs.items():
            program.stage_constants(order_constants(self._bound[blob], weights))

    def _swap(self) -> None:
        for program in self._programs.values():
            program.swap_constants()


def _convention_of(executable: Executable) -> tuple[object, ...]:
    return (executable.inputs, executable.outputs, executable.state, executable.constants, executable.state_convention)
