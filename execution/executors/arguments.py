"""The arguments of an executable, checked before native code reads them.

Compiled code ends the process if an index is out of range, so ranges are checked too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bundle.abi.inputs import INPUTS
from bundle.errors import FieldViolation
from bundle.manifest import Executable, Manifest, TensorSpec
from execution.dtypes import TORCH_DTYPES, dtype_name
from execution.errors import ExecutableInvalid, ExecutableUnknown, StepInvalid


class StepArguments:
    """Checks and orders the inputs of a bundle's executables."""

    def __init__(self, manifest: Manifest) -> None:
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._ranges = {tag: _ranges(manifest, executable) for tag, executable in self._executables.items()}

    def executable(self, tag: str) -> Executable:
        """Returns the executable of a tag."""
        executable = self._executables.get(tag)
        if executable is None:
            raise ExecutableUnknown(tag, sorted(self._executables))
        return executable

    def order(self, executable: Executable, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Checks inputs and returns them in calling order."""
        names = [spec.name for spec in executable.inputs]
        if inputs.keys() != set(names):
            got = ", ".join(sorted(inputs)) or "nothing"
            raise StepInvalid(executable.tag, FieldViolation("inputs", got, ", ".join(names)))
        for spec in executable.inputs:
            tensor = inputs[spec.name]
            got = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            accepted = f"{spec.dtype} {list(spec.shape)}"
            if got != accepted or not tensor.is_contiguous():
                got += "" if tensor.is_contiguous() else ", not contiguous"
                raise StepInvalid(executable.tag, FieldViolation(f"inputs[{spec.name}]", got, accepted))
        for name, accepted_range in self._ranges[executable.tag].items():
            smallest, largest = (int(extreme) for extreme in inputs[name].aminmax())
            outside = smallest if smallest not in accepted_range else largest
            if outside not in accepted_range:
                accepted = f"{accepted_range.start} to {accepted_range.stop - 1}"
                raise StepInvalid(executable.tag, FieldViolation(f"inputs[{name}]", str(outside), accepted))
        return [inputs[name] for name in names]


def order_constants(executable: Executable, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensor of each constant that the manifest binds, by its name; `weights` is by weight set and name."""
    constants = {}
    for binding in executable.constants:
        tensor = weights.get(binding.weight_set, {}).get(binding.tensor)
        if tensor is None:
            detail = f"constant {binding.name} is bound to {binding.weight_set}/{binding.tensor}, which is no weight"
            raise ExecutableInvalid(executable.tag, detail)
        constants[binding.name] = tensor
    return constants


def make_tensors(
    specs: Iterable[TensorSpec], values: Mapping[str, Sequence[int] | Sequence[float]]
) -> dict[str, Tensor]:
    """Makes tensors of row-major values. Names that `specs` lacks are ignored."""
    return {
        spec.name: torch.tensor(values[spec.name], dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape) for spec in specs
    }


def _ranges(manifest: Manifest, executable: Executable) -> dict[str, range]:
    symbols = manifest.symbols_of(executable)
    ranges = {spec.name: INPUTS[spec.name].accepted_values(symbols) for spec in executable.inputs}
    return {name: accepted for name, accepted in ranges.items() if accepted is not None}
