"""Errors of sharding.

KilnError
└── ShardingNotServed    a tensor-parallel degree that does not divide the model
"""

from __future__ import annotations

from bundle.errors import FieldViolation, KilnError


class ShardingNotServed(KilnError):
    """A tensor-parallel degree that does not divide the model."""

    reason = "FEATURE_NOT_SERVED"

    def __init__(self, tp_degree: int, attribute: str, count: int) -> None:
        violation = FieldViolation(
            "neuron_config.tp_degree", f"{tp_degree} with {attribute} {count}", f"a divisor of {attribute}, {count}"
        )
        super().__init__(str(violation), violations=(violation,), tp_degree=tp_degree, attribute=attribute)
