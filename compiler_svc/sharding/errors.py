"""Errors of sharding."""

from __future__ import annotations

from bundle.errors import FieldViolation, KilnError, Unsaid
from compiler_svc.weights.errors import CheckpointError


class ShardingNotServed(KilnError, code="INVALID_ARGUMENT", reason="FEATURE_NOT_SERVED"):
    """A tensor-parallel degree that leaves ranks with nothing but padding, or divides groups of quantized weights."""

    violation = FieldViolation("neuron_config.tp_degree", "{tp_degree} with {attribute} {count}", "{accepted}")
    tp_degree: int
    attribute: str
    count: Unsaid[int]
    accepted: Unsaid[str]


class CheckpointQuantized(CheckpointError):
    """A checkpoint to quantize whose matrices are quantized already."""

    violation = FieldViolation("model", "{model}, which is quantized already", "a checkpoint whose matrices are floats")
    model: str


class NothingToQuantize(CheckpointError):
    """A checkpoint none of whose matrices can be quantized as the request asks for."""

    violation = FieldViolation(
        "model",
        "{model}, of which {dtype} would quantize no linear layer",
        "matrices [outputs, inputs] whose inputs groups divide, and modules_to_not_convert that leaves some of them",
    )
    model: str
    dtype: str
