"""What an executable is called with, checked before native code sees it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bundle.errors import FieldViolation
from bundle.manifest import Executable
from execution.dtypes import dtype_name
from execution.errors import ExecutableInvalid, StepInvalid


def order_inputs(executable: Executable, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Inputs in calling order.

    Raises:
        StepInvalid: They are not the manifest's.
    """
    names = [spec.name for spec in executable.inputs]
    if inputs.keys() != set(names):
        raise StepInvalid(
            executable.tag, FieldViolation("inputs", ", ".join(sorted(inputs)) or "nothing", ", ".join(names))
        )
    for spec in executable.inputs:
        tensor = inputs[spec.name]
        got = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        accepted = f"{spec.dtype} {list(spec.shape)}"
        if got != accepted or not tensor.is_contiguous():
            got += "" if tensor.is_contiguous() else ", not contiguous"
            raise StepInvalid(executable.tag, FieldViolation(f"inputs[{spec.name}]", got, accepted))
    return [inputs[name] for name in names]


def order_constants(executable: Executable, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensor of each constant that the manifest binds, by the constant's name.

    Args:
        weights: Tensors by weight set and name.

    Raises:
        ExecutableInvalid: A binding names a tensor that no weight set has.
    """
    constants = {}
    for binding in executable.constants:
        tensor = weights.get(binding.weight_set, {}).get(binding.tensor)
        if tensor is None:
            detail = f"constant {binding.name} is bound to {binding.weight_set}/{binding.tensor}, which is no weight"
            raise ExecutableInvalid(executable.tag, detail)
        constants[binding.name] = tensor
    return constants
