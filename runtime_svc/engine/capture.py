"""Inputs of chosen steps, kept as an executable got them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bundle.manifest import TensorSpec

#: Most steps of one capture.
MAX_STEPS: Final = 1024
#: Most bytes of inputs that one capture keeps; steps beyond are counted only.
MAX_CAPTURE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class CapturedInput:
    """One input: the executable's tensor, row-major, in the byte order of the host."""

    spec: TensorSpec
    data: bytes


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One step.

    Attributes:
        index: Among the steps that the request takes part in, from 0.
        tag: The executable.
        row: The request's row.
        num_tokens: Tokens of the request that the step computes.
        weight_epoch: Weights that it computes with.
        inputs: In calling order.
    """

    index: int
    tag: str
    row: int
    num_tokens: int
    weight_epoch: int
    inputs: tuple[CapturedInput, ...]


class InputCapture:
    """What one request captures."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        """Captures `num_steps` steps from `first_step` on, of those that the request takes part in."""
        self.first_step = first_step
        self.num_steps = num_steps
        #: The steps captured so far, oldest first. One that failed is the last.
        self.steps: list[CapturedStep] = []
        #: Chosen steps that were too large to be kept.
        self.num_dropped = 0
        self._num_seen = 0
        self._size_bytes = 0

    def begin_step(self) -> int | None:
        """Counts a step; returns its index where it is to be captured."""
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
