"""From a step that is about to run to the captures of its requests."""

from __future__ import annotations

from array import array
from typing import Final

from bundle.manifest import Manifest
from execution.step import Step, step_inputs
from runtime_svc.engine.capture import CapturedInput, CapturedStep
from runtime_svc.engine.scheduler import StepPlan

# As `execution.ranks.step_memory` has them: every input of a step is one of the two.
_ITEM_FORMATS: Final = {"int32": "i", "float32": "f"}


class CaptureLog:
    """Gives the captures of a step's requests what goes to the executable."""

    def __init__(self, manifest: Manifest) -> None:
        """Takes the dtypes and shapes of inputs from the manifest."""
        self._specs = {one.tag: step_inputs(one, manifest.sampling) for one in manifest.executables}

    def record(self, plan: StepPlan, step: Step, weight_epoch: int) -> None:
        """Keeps the inputs of a step that is about to run, for those of its requests that want it."""
        inputs: tuple[CapturedInput, ...] | None = None
        for row in plan.rows:
            capture = row.request.capture
            index = None if capture is None else capture.begin_step()
            if capture is None or index is None:
                continue
            if inputs is None:
                inputs = self._copy_inputs(step)
            capture.keep(CapturedStep(index, step.tag, row.row, row.num_tokens, weight_epoch, inputs))

    def _copy_inputs(self, step: Step) -> tuple[CapturedInput, ...]:
        return tuple(
            CapturedInput(spec, array(_ITEM_FORMATS[spec.dtype], step.inputs[spec.name]).tobytes())
            for spec in self._specs[step.tag]
        )
