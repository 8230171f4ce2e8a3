"""Errors of sharding."""

from __future__ import annotations

from bundle.errors import FieldViolation, KilnError, Unsaid


class ShardingNotServed(KilnError, code="INVALID_ARGUMENT", reason="FEATURE_NOT_SERVED"):
    """A tensor-parallel degree that leaves ranks with nothing but padding, or divides groups of quantized weights."""

    violation = FieldViolation("neuron_config.tp_degree", "{tp_degree} with {attribute} {count}", "{accepted}")
    tp_degree: int
    attribute: str
    count: Unsaid[int]
    accepted: Unsaid[str]
