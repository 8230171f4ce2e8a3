"""Inputs of chosen steps, kept as an executable got them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bundle.manifest import Manifest, TensorSpec
from execution.step import Step, step_inputs

#: Steps of one capture.
MAX_STEPS: Final = 1024
#: Bytes of inputs that one capture keeps; steps beyond are counted only.
MAX_CAPTURE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class CapturedInput:
    """One input: the executable's tensor, row-major, in the byte order of the host."""

    spec: TensorSpec
    data: bytes


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One step that a request takes part in; `index` counts the request's steps from 0.

    `tag` is that of the executable; `num_tokens` counts the request's tokens alone; `inputs` are in calling order.
    """

    index: int
    tag: str
    row: int
    num_tokens: int
    weight_epoch: int
    inputs: tuple[CapturedInput, ...]


class InputCapture:
    """The capture of one request."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        #: The steps captured so far, oldest first. One that failed is the last.
        self.steps: list[CapturedStep] = []
        #: Chosen steps that were too large to be kept.
        self.num_dropped = 0
        self._num_seen = 0
        self._size_bytes = 0

    def begin_step(self) -> int | None:
        """Counts a step; returns its index if it is to be captured."""
        index = self._num_seen
        self._num_seen += 1
        return index if 0 <= index - self.first_step < self.num_steps else None

    def keep(self, step: CapturedStep) -> None:
        """Takes a step in, unless it makes the capture too large: then this one and all later ones are left out."""
        size_bytes = sum(len(one.data) for one in step.inputs)
        if self.num_dropped or self._size_bytes + size_bytes > MAX_CAPTURE_BYTES:
            self.num_dropped += 1
            return
        self._size_bytes += size_bytes
        self.steps.append(step)


@dataclass(frozen=True, slots=True)
class CapturedRow:
    """A row of a step whose request captures inputs; weights of `weight_epoch` compute `num_tokens` of its tokens."""

    capture: InputCapture
    row: int
    num_tokens: int
    weight_epoch: int


class CaptureLog:
    """Records the inputs of steps in the captures of their requests."""

    def __init__(self, manifest: Manifest) -> None:
        self._specs = {one.tag: step_inputs(one, manifest.sampling) for one in manifest.executables}

    def record(self, step: Step, rows: Iterable[CapturedRow]) -> None:
        """Keeps the inputs of a step that is about to run, for those of its rows that chose the step."""
        inputs: tuple[CapturedInput, ...] | None = None
        for row in rows:
            index = row.capture.begin_step()
            if index is None:
                continue
            if inputs is None:
                inputs = self._copy_inputs(step)
            row.capture.keep(CapturedStep(index, step.tag, row.row, row.num_tokens, row.weight_epoch, inputs))

    def _copy_inputs(self, step: Step) -> tuple[CapturedInput, ...]:
        return tuple(CapturedInput(spec, step.inputs[spec.name].tobytes()) for spec in self._specs[step.tag])
