"""The inputs of steps as lists."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from bundle.abi.inputs import INPUTS
from execution.step import ITEM_FORMATS, StepInputs


def make_inputs(values: Mapping[str, Sequence[float]]) -> StepInputs:
    return {name: array(ITEM_FORMATS[INPUTS[name].dtype], own) for name, own in values.items()}


def list_values(inputs: StepInputs) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in inputs.items()}
