"""Rules on what a target's cores can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from compiler_svc.config.rules.rule import Rule
from compiler_svc.config.tables.documents import DISTRIBUTED

#: Degrees of tensor parallelism that the Neuron runtime has, by target. No document lists those of trn3: Kiln takes
#: those of trn2, unverified. The older guide of Transformers NeuronX has no 16 for trn1. cpu takes every degree in the
#: attribute's domain.
TP_DEGREES: Final[Mapping[str, tuple[int, ...]]] = {
    "trn1": (1, 2, 8, 16, 32),
    "inf2": (1, 2, 4, 8, 24),
    "trn2": (1, 2, 4, 8, 16, 32, 64),
    "trn3": (1, 2, 4, 8, 16, 32, 64),
}


def _runtime_has_degree(target: str, degrees: tuple[int, ...]) -> Rule:
    *most, last = map(str, degrees)
    unverified = ", which are those of trn2 because no document lists them" if target == "trn3" else ""
    return Rule(
        ("tp_degree", "target"),
        lambda v: v["target"] != target or v["tp_degree"] in degrees,
        f"{', '.join(most)} or {last}: the degrees of {target}{unverified}",
        DISTRIBUTED,
    )


TARGET_RULES: Final = tuple(_runtime_has_degree(target, degrees) for target, degrees in TP_DEGREES.items())
