"""Errors of sharding.

KilnError
└── ShardingNotServed    a tensor-parallel degree that leaves ranks with nothing but padding
"""

from __future__ import annotations

from bundle.errors import FieldViolation, KilnError


class ShardingNotServed(KilnError):
    """A tensor-parallel degree that leaves ranks with nothing but padding."""

    reason = "FEATURE_NOT_SERVED"

    def __init__(self, tp_degree: int, attribute: str, count: int) -> None:
        violation = FieldViolation(
            "neuron_config.tp_degree", f"{tp_degree} with {attribute} {count}", f"at most {attribute}, {count}"
        )
        super().__init__(str(violation), violations=(violation,), tp_degree=tp_degree, attribute=attribute)
