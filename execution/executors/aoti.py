"""Runs libraries made by AOTInductor, which write the state in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from bundle.host.shortage import find_shortage
from bundle.manifest import Executable, Manifest
from execution.dtypes import dtype_name
from execution.errors import ExecutableInvalid, StepFailed
from execution.executors.aoti_library import AotiError, AotiLibrary
from execution.executors.executor import Executor
from execution.executors.host import HostExecutor

CONSTANT_ALIGNMENT_BYTES: Final = 64


def load_aoti_executor(
    manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
) -> Executor:
    """Loads a rank; see `execution.executors.executor.load_executor`."""
    return HostExecutor(manifest, rank, blob_path, on_loaded, AotiProgram)


class AotiProgram:
    """See `execution.executors.host.HostProgram`."""

    def __init__(self, executable: Executable, path: Path) -> None:
        self._tag = executable.tag
        try:
            self._library = AotiLibrary(path)
        except AotiError as error:
            invalid = ExecutableInvalid(executable.tag, "it is no library that loads; the log of its rank says why")
            raise find_shortage(error) or invalid from error
        got = (self._library.num_inputs, self._library.num_outputs)
        expected = (len(executable.inputs) + len(executable.state), len(executable.outputs))
        if got != expected:
            detail = f"it takes {got[0]} and returns {got[1]} tensors, the manifest has {expected}"
            raise ExecutableInvalid(executable.tag, detail)

    def stage_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Binds tensors after a check of their sizes: the library would read past the end of one that is too small."""
        for wanted in self._library.constants:
            tensor = constants.get(wanted.name)
            if tensor is None:
                raise ExecutableInvalid(self._tag, f"constant {wanted.name} is bound to no weight")
            # AOTInductor states sizes rounded up to its alignment.
            size_bytes = -(-tensor.nbytes // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
            if (tensor.dtype, size_bytes) != (wanted.dtype, wanted.size_bytes):
                got = f"{dtype_name(tensor.dtype)} of {tensor.nbytes} bytes"
                accepted = f"{dtype_name(wanted.dtype)} of {wanted.size_bytes} bytes"
                raise ExecutableInvalid(self._tag, f"constant {wanted.name} is bound to {got}, and takes {accepted}")
        self._library.bind_constants(constants)

    def discard_staged(self) -> None:
        """Has no effect, because the library keeps no tensor's memory alive."""

    def swap_constants(self) -> None:
        """Exchanges the staged constants and those in use."""
        self._library.swap_constants()

    def run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the library once on inputs and state in calling order."""
        try:
            return self._library.run(arguments)
        except AotiError as error:
            raise StepFailed(self._tag) from error

    def close(self) -> None:
        """Releases the library."""
        self._library.close()
