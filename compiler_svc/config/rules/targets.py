"""Rules on what a target's cores can do."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import KILN, Rule
from compiler_svc.config.tables.documents import DISTRIBUTED
from targets.registry import TARGETS
from targets.target import Target

_SAMPLING: Final = "on_device_sampling_config"


def _runtime_has_degree(target: Target) -> Rule:
    *most, last = map(str, target.tp_degrees)
    note = f", which are {target.tp_degrees_note}" if target.tp_degrees_note else ""
    return Rule(
        ("tp_degree", "target"),
        lambda v: v["target"] != target.kind or v["tp_degree"] in target.tp_degrees,
        f"{', '.join(most)} or {last}: the degrees of {target.kind}{note}",
        DISTRIBUTED,
    )


def _orders_candidates(target: Target, most: int) -> Rule:
    return Rule(
        (f"{_SAMPLING}.global_topk", "target"),
        lambda v: v["target"] != target.kind or _count_candidates(v) in range(1, most + 1),
        f"from 1 to {most} where tokens are sampled: the compiler for {target.kind} has no sort",
        KILN,
    )


def _count_candidates(values: Values) -> int:
    """The candidates that sampling in the executable puts in order, 0 being all; 1 if there is no sampling in it."""
    sampling = values[_SAMPLING]
    picks_others = sampling is not None and (sampling["do_sample"] or sampling["dynamic"])
    return int(sampling["global_topk"]) if picks_others else 1


TARGET_RULES: Final = (
    *(_runtime_has_degree(target) for target in TARGETS.values() if not target.takes_other_degrees),
    *(
        _orders_candidates(target, target.max_candidates)
        for target in TARGETS.values()
        if target.max_candidates is not None
    ),
)
