"""Runs libraries made by AOTInductor, which write the state where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from bundle.manifest import Executable, Manifest
from execution.dtypes import dtype_name
from execution.errors import ExecutableInvalid, StepFailed, WeightsAwaited, WeightsNotStaged
from execution.executors.aoti_library import AotiError, AotiLibrary
from execution.executors.arguments import StepArguments, order_constants
from execution.executors.state import RankState
from execution.executors.weights import RankWeights

CONSTANT_ALIGNMENT_BYTES: Final = 64


class AotiExecutor:
    """See `execution.executors.executor.Executor`. All libraries share one mapping of the weights and one state."""

    def __init__(
        self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
    ) -> None:
        """Loads; see `execution.executors.executor.load_executor`."""
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._arguments = StepArguments(manifest)
        self._weights = RankWeights(manifest, rank, blob_path)
        self._state = RankState(manifest.state)
        on_loaded("weights")
        self._libraries: dict[str, AotiLibrary] = {}
        for tag, executable in self._executables.items():
            self._libraries[tag] = _load_library(executable, blob_path(executable.blob))
            on_loaded(tag)
        if self._weights.is_complete:
            self._bind(self._weights.active)
            self._swap()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in use."""
        return self._weights.size_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._state.size_bytes

    def run(self, tag: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs one executable once."""
        executable = self._arguments.executable(tag)
        arguments = self._arguments.order(executable, inputs)
        if not self._weights.is_complete:
            # The libraries have no constants yet, and would read them all the same.
            raise WeightsAwaited
        arguments += [self._state.tensors[name] for name in executable.state]
        try:
            outputs = self._libraries[tag].run(arguments)
        except AotiError as error:
            raise StepFailed(tag, str(error)) from error
        return {spec.name: output for spec, output in zip(executable.outputs, outputs, strict=True)}

    def stage_weights(self, path: Path) -> None:
        """Maps other weights beside the ones in use."""
        self._bind(self._weights.stage(path))

    def swap_weights(self) -> None:
        """Puts the staged weights in use."""
        if self._weights.staged is None:
            raise WeightsNotStaged
        self._swap()
        self._weights.swap()

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
        for library in self._libraries.values():
            library.close()
        self._libraries.clear()
        self._weights.close()
        self._state.tensors.clear()

    def _bind(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        for tag, library in self._libraries.items():
            constants = order_constants(self._executables[tag], weights)
            _check_constants(tag, library, constants)
            library.bind_constants(constants)

    def _swap(self) -> None:
        for library in self._libraries.values():
            library.swap_constants()


def _load_library(executable: Executable, path: Path) -> AotiLibrary:
    try:
        library = AotiLibrary(path)
    except AotiError as error:
        raise ExecutableInvalid(executable.tag, str(error)) from error
    expected = (len(executable.inputs) + len(executable.state), len(executable.outputs))
    if (library.num_inputs, library.num_outputs) != expected:
        detail = f"it takes {library.num_inputs} and returns {library.num_outputs} tensors, the manifest has {expected}"
        raise ExecutableInvalid(executable.tag, detail)
    return library


def _check_constants(tag: str, library: AotiLibrary, constants: Mapping[str, Tensor]) -> None:
    for wanted in library.constants:
        tensor = constants.get(wanted.name)
        if tensor is None:
            raise ExecutableInvalid(tag, f"constant {wanted.name} is bound to no weight")
        # AOTInductor states sizes rounded up to its alignment.
        size_bytes = -(-tensor.nbytes // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
        if (tensor.dtype, size_bytes) != (wanted.dtype, wanted.size_bytes):
            got = f"{dtype_name(tensor.dtype)} of {tensor.nbytes} bytes"
            accepted = f"{dtype_name(wanted.dtype)} of {wanted.size_bytes} bytes"
            raise ExecutableInvalid(tag, f"constant {wanted.name} is bound to {got}, and takes {accepted}")
