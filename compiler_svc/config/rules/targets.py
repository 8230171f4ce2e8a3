"""Rules on what a target's cores can do."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import Rule
from compiler_svc.config.tables.documents import DISTRIBUTED
from targets.registry import TARGETS
from targets.target import Target


def _runtime_has_degree(target: Target) -> Rule:
    *most, last = map(str, target.tp_degrees)
    note = f", which are {target.tp_degrees_note}" if target.tp_degrees_note else ""
    return Rule(
        ("tp_degree", "target"),
        lambda v: v["target"] != target.kind or v["tp_degree"] in target.tp_degrees,
        f"{', '.join(most)} or {last}: the degrees of {target.kind}{note}",
        DISTRIBUTED,
    )


TARGET_RULES: Final = tuple(
    _runtime_has_degree(target) for target in TARGETS.values() if not target.takes_other_degrees
)
