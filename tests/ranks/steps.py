"""Steps of tests: a few rows with tokens, all others idle, as the ABI says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from bundle.manifest import Executable, Manifest
from execution.executors.arguments import make_tensors
from execution.step import StepForm, StepInputs


class Row(NamedTuple):
    """Tokens of the sequence in a slot, the first at position `start`."""

    slot: int
    tokens: Sequence[int]
    start: int = 0


def make_inputs(manifest: Manifest, executable: Executable, rows: Mapping[int, Row]) -> StepInputs:
    """Values of a step's inputs.

    Args:
        rows: The rows that are not idle.
    """
    form = StepForm(manifest, executable)
    inputs = form.make_idle()
    for index, row in rows.items():
        form.put_tokens(inputs, index, row.tokens, start=row.start, blocks=(row.slot,))
    return inputs


def make_input_tensors(manifest: Manifest, executable: Executable, rows: Mapping[int, Row]) -> dict[str, Tensor]:
    """Inputs of the executable itself, without those of a host that samples."""
    return make_tensors(executable.inputs, make_inputs(manifest, executable, rows))
