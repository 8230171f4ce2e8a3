"""Estimates what a compile would cost, from what similar builds have cost on this host.

Lowerings are similar if they have the same target, level and submodel and neither model has more than twice the
layers of the other; the estimate scales their time with the layers. The other work of a build, except tracing, scales
with its weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from compiler_svc.database.actuals import BuildActual, LoweringActual

#: Seconds of one lowering on a host without records, by level: for every one, and for each layer. Measured with 12
#: layers on two cores; the first lowering that ends corrects them.
_GUESSED_S: Final = {0: (0.5, 0.05), 1: (6.0, 1.2), 2: (6.0, 1.2)}

#: Models are similar if neither has more than this many times the layers of the other.
_LIKE: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated cost of a compile.

    Attributes:
        duration_s: From the start until the bundle is published.
        peak_memory_bytes: Peak memory of one lowering; 0 if the compile needs no lowering.
        num_records: Number of recorded lowerings behind the estimate.
    """

    duration_s: float
    peak_memory_bytes: int
    num_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a compile.

    Attributes:
        missing: Submodel of each executable that is not in the cache.
        num_executables: Number of executables that are traced: all but those that share another's graph.
        weights_bytes: Bytes of the weights of all ranks.
        num_lowerings: Number of lowerings that run at once.
    """

    missing: Sequence[str]
    num_executables: int
    num_layers: int
    weights_bytes: int
    num_lowerings: int


def estimate_cost(
    work: Work, lowerings: Sequence[LoweringActual], builds: Sequence[BuildActual]
) -> CostEstimate | None:
    """Estimates the cost of a compile from records with its target and level; None if no similar one is recorded."""
    like_builds = [build for build in builds if _are_alike(build.num_layers, work.num_layers)]
    like = {submodel: _find_alike(submodel, work.num_layers, lowerings) for submodel in set(work.missing)}
    if not like_builds or not all(like.values()):
        return None
    each_s = {submodel: _scale_s(work.num_layers, records) for submodel, records in like.items()}
    lowering_s = _add_rounds_s([each_s[submodel] for submodel in work.missing], work.num_lowerings)
    return CostEstimate(
        duration_s=lowering_s + statistics.median(_estimate_rest_s(work, build) for build in like_builds),
        peak_memory_bytes=max((one.peak_memory_bytes for records in like.values() for one in records), default=0),
        num_records=sum(map(len, like.values())),
    )


def estimate_lowering_s(
    missing: Sequence[str],
    lowerings: Sequence[LoweringActual],
    *,
    num_layers: int,
    num_lowerings: int,
    optimization_level: int,
) -> float:
    """Estimates the time of lowerings, in seconds: from similar ones among the records, which have the same target and
    level, or else from what they took on another host. `missing` has the submodel of each lowering.
    """
    each_s, layer_s = _GUESSED_S[optimization_level]
    guess_s = each_s + layer_s * num_layers

    def estimate_s(submodel: str) -> float:
        records = _find_alike(submodel, num_layers, lowerings)
        return _scale_s(num_layers, records) if records else guess_s

    return _add_rounds_s([estimate_s(submodel) for submodel in missing], num_lowerings)


def _find_alike(submodel: str, num_layers: int, lowerings: Sequence[LoweringActual]) -> list[LoweringActual]:
    return [one for one in lowerings if one.submodel == submodel and _are_alike(one.num_layers, num_layers)]


def _scale_s(num_layers: int, records: Sequence[LoweringActual]) -> float:
    return statistics.median(one.duration_s * num_layers / one.num_layers for one in records)


def _add_rounds_s(durations_s: Sequence[float], num_lowerings: int) -> float:
    # Every round runs `num_lowerings` at once; the last round may run fewer.
    rounds = math.ceil(len(durations_s) / num_lowerings)
    return rounds * sum(durations_s) / len(durations_s) if durations_s else 0.0


def _are_alike(layers: int, other: int) -> bool:
    return max(layers, other) <= _LIKE * min(layers, other)


def _estimate_rest_s(work: Work, build: BuildActual) -> float:
    traced = (work.num_executables * work.num_layers) / (build.num_executables * build.num_layers)
    return build.trace_s * traced + build.rest_s * work.weights_bytes / build.weights_bytes
