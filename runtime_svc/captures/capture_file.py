"""Renders the safetensors file of one capture: a tensor `STEP.INPUT` for each input, and metadata as text:

first_step, num_steps   the steps that the request asked for
captured_steps          number of steps in the file, from first_step on
dropped_steps           number of steps left out because the file would have become too large
STEP.executable, STEP.row, STEP.num_tokens, STEP.weight_epoch
                        the executable's tag, the request's row, its tokens in the step, and the weights in use

This file does not use the safetensors library, which writes arrays of torch or numpy, which this process does not load,
or memory at raw addresses. Tests read the files with the library.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

from bundle.abi.tensor import DTYPES
from runtime_svc.engine.capture import InputCapture

FORMAT: Final = "kiln.inputs.v1"

_ALIGNMENT_BYTES: Final = 8


def render_capture(capture: InputCapture, *, deployment_id: str, bundle: str, request_id: str) -> Iterator[bytes]:
    """Yields the file in pieces. Equal captures give equal bytes."""
    metadata = {
        "format": FORMAT,
        "deployment_id": deployment_id,
        "bundle": bundle,
        "request_id": request_id,
        "first_step": str(capture.first_step),
        "num_steps": str(capture.num_steps),
        "captured_steps": str(len(capture.steps)),
        "dropped_steps": str(capture.num_dropped),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for step in capture.steps:
        metadata[f"{step.index}.executable"] = step.tag
        metadata[f"{step.index}.row"] = str(step.row)
        metadata[f"{step.index}.num_tokens"] = str(step.num_tokens)
        metadata[f"{step.index}.weight_epoch"] = str(step.weight_epoch)
        for one in step.inputs:
            end = offset + len(one.data)
            header[f"{step.index}.{one.spec.name}"] = {
                "dtype": DTYPES[one.spec.dtype].safetensors,
                "shape": one.spec.shape,
                "data_offsets": (offset, end),
            }
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    yield struct.pack("<Q", len(text)) + text
    for step in capture.steps:
        for one in step.inputs:
            yield one.data
