from dataclasses import replace
from typing import Any

import msgspec
import pytest

from compiler_svc.database.actuals import BuildActual, LoweringActual
from compiler_svc.planning.cost import CostEstimate, Work, estimate_cost, estimate_lowering_s

LOWERING = LoweringActual(submodel="token_generation", num_layers=4, duration_s=8.0, peak_memory_bytes=100)
PREFILL = LoweringActual(submodel="context_encoding", num_layers=4, duration_s=12.0, peak_memory_bytes=300)
BUILD = BuildActual(num_layers=4, num_executables=2, weights_bytes=1000, trace_s=2.0, rest_s=3.0)
WORK = Work(
    missing=("context_encoding", "token_generation"),
    num_executables=2,
    num_layers=4,
    weights_bytes=1000,
    num_lowerings=1,
)


SEVERAL = [msgspec.structs.replace(LOWERING, duration_s=seconds) for seconds in (7.0, 8.0, 100.0)]


@pytest.mark.parametrize(
    ("changes", "lowerings", "expected"),
    [
        ({}, [LOWERING, PREFILL], (8 + 12 + 2 + 3, 300, 2)),
        # Lowerings run beside each other.
        ({"num_lowerings": 2}, [LOWERING, PREFILL], (10 + 2 + 3, 300, 2)),
        # Larger models take longer.
        ({"num_layers": 8}, [LOWERING, PREFILL], (2 * (8 + 12) + 2 * 2 + 3, 300, 2)),
        ({"num_executables": 3}, [LOWERING, PREFILL], (8 + 12 + 1.5 * 2 + 3, 300, 2)),
        ({"weights_bytes": 3000}, [LOWERING, PREFILL], (8 + 12 + 2 + 3 * 3, 300, 2)),
        # What the cache has costs nothing.
        ({"missing": ()}, [], (5.0, 0, 0)),
        # The middle of several counts.
        ({"missing": ("token_generation",)}, SEVERAL, (8 + 2 + 3, 100, 3)),
    ],
)
def test_builds_like_one_before(
    changes: dict[str, Any], lowerings: list[LoweringActual], expected: tuple[float, int, int]
) -> None:
    duration_s, peak, num_records = expected
    assert estimate_cost(replace(WORK, **changes), lowerings, [BUILD]) == CostEstimate(
        duration_s=duration_s, peak_memory_bytes=peak, num_records=num_records
    )


@pytest.mark.parametrize(
    ("lowerings", "builds", "num_layers"),
    [
        ([], [], 4),
        ([LOWERING], [BUILD], 4),
        ([LOWERING, PREFILL], [], 4),
        ([LOWERING, PREFILL], [BUILD], 9),
        ([LOWERING, PREFILL], [BUILD], 1),
    ],
    ids=["nothing recorded", "no such submodel", "no build", "far larger", "far smaller"],
)
def test_nothing_like_it_was_built(lowerings: list[LoweringActual], builds: list[BuildActual], num_layers: int) -> None:
    assert estimate_cost(replace(WORK, num_layers=num_layers), lowerings, builds) is None


class TestLowerings:
    def estimate_s(self, *records: LoweringActual, missing: int = 2, num_layers: int = 4, level: int = 1) -> float:
        return estimate_lowering_s(
            ["token_generation"] * missing, records, num_layers=num_layers, num_lowerings=2, optimization_level=level
        )

    def test_records_of_this_host_count(self) -> None:
        assert self.estimate_s(LOWERING) == 8
        assert self.estimate_s(LOWERING, missing=3) == 16
        assert self.estimate_s(LOWERING, num_layers=8) == 16

    def test_the_first_compile_of_a_host_is_estimated_too(self) -> None:
        assert 0 < self.estimate_s(level=0) < self.estimate_s(num_layers=2) < self.estimate_s(num_layers=40)
        assert self.estimate_s(LOWERING, num_layers=40) == self.estimate_s(num_layers=40)
