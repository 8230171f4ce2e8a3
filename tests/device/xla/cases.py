"""What runs on the XLA device: a covering array of families and of the ways to pick, pad, lay out and compute.

Each family has two cases with opposite paddings, layouts and dtypes, and with different picks. Twelve families have
every way once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import pytest

from bundle.abi.submodels import SubmodelName
from tests.checkpoints.specs import HOST_SAMPLING
from tests.device.xla.models import FAMILIES
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

PICKS: Final[Mapping[str, dict[str, Any]]] = {
    "greedy": {"sampling": make_sampling(temperature=0.0)},
    "sampled": {"sampling": make_sampling(dynamic=True)},
    "logits": {"sampling": HOST_SAMPLING},
}
PADDINGS: Final = ("right", "left")
LAYOUTS: Final[Mapping[str, dict[str, Any]]] = {"slots": {}, "blocks": {"num_blocks": 12, "block_tokens": 16}}
DTYPES: Final = ("float32", "bfloat16")

#: Of each submodel, in tokens: the first is the shorter one.
BUCKETS: Final[Mapping[SubmodelName, tuple[int, int]]] = {"context_encoding": (16, 32), "token_generation": (32, 48)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one way to pick, pad, lay out and compute."""

    family: str
    architecture: str
    attributes: dict[str, Any]
    pick: str
    padding_side: str
    layout: str
    dtype: str

    @property
    def name(self) -> str:
        return "-".join((self.family, self.pick, self.padding_side, self.layout, self.dtype))

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes in a graph spec."""
        own = {"padding_side": self.padding_side, "dtype": self.dtype, "ctx_batch_size": 3}
        return PICKS[self.pick] | LAYOUTS[self.layout] | own

    def name_graph(self, tag: str) -> str:
        """What the record of the graph of an executable is called."""
        return f"{self.name}-{tag}"


def _list_cases() -> Iterator[Case]:
    picks = list(PICKS)
    # Half of the ways to pad, lay out and compute; the others are their opposites.
    halves = [(0, *rest) for rest in product((0, 1), repeat=2)]
    pairs = list(product(range(len(picks)), halves))
    for number, family in enumerate(FAMILIES):
        pick, half = pairs[number % len(pairs)]
        architecture, attributes = family.values
        for turn in (0, 1):
            padding, layout, dtype = ((choice + turn) % 2 for choice in half)
            yield Case(
                family=str(family.id),
                architecture=architecture,
                attributes=attributes,
                pick=picks[(pick + turn) % len(picks)],
                padding_side=PADDINGS[padding],
                layout=list(LAYOUTS)[layout],
                dtype=DTYPES[dtype],
            )


CASES: Final = tuple(_list_cases())
CASE_PARAMS: Final = [pytest.param(case, id=case.name) for case in CASES]
