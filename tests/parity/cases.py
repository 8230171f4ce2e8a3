"""Which geometry is compiled for how many ranks at which optimization level, and which run of the tests does it.

`make test` runs every case at -O0 and a selection at -O1 that has every pair of (KV heads to a query head, ranks),
(tied or not, ranks) and (heads padded or not, ranks), and each kind of rope; `make test-full` runs everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.parity.geometries import GEOMETRIES

DEGREES: Final = (1, 2, 4)
LEVELS: Final = (0, 1, 2)

#: Positions of a sequence, and tokens of the longest prompt.
SEQ_LEN: Final = 128
LONGEST_PROMPT: Final = 32

#: (geometry, degree) of the -O1 selection, with the number of buckets of each submodel.
PAIRWISE: Final[dict[tuple[str, int], int]] = {
    ("gqa4-tied-llama3", 2): 2,
    ("mha-bias-default", 1): 1,
    ("mha-bias-default", 4): 1,
    ("gqa2-tied-linear", 1): 1,
    ("gqa2-tied-linear", 4): 1,
    ("gqa4-tied-llama3", 1): 1,
    ("gqa4-tied-llama3", 4): 1,
    ("gqa8-untied-dynamic", 1): 1,
    ("gqa8-untied-dynamic", 2): 1,
    ("gqa8-untied-dynamic", 4): 1,
    ("padded-gqa2-yarn", 2): 1,
    ("padded-mha-longrope", 2): 1,
    ("padded-groups-bias", 4): 1,
}


@dataclass(frozen=True)
class Case:
    """One bundle.

    Attributes:
        num_buckets: Buckets of each submodel, 1 or 2.
        has_logits: Whether its executables return logits. Without, ranks never gather them: each picks among its own
            part of the vocabulary, and the picks are compared.
    """

    geometry: str
    tp_degree: int
    level: int
    num_buckets: int
    has_logits: bool = True

    @property
    def name(self) -> str:
        """Name of the case, of its bundle and of its deployment."""
        return f"{self.geometry}-tp{self.tp_degree}-o{self.level}" + ("" if self.has_logits else "-tokens")

    @property
    def num_executables(self) -> int:
        """Executables of the bundle."""
        return 2 * self.num_buckets

    @property
    def context_buckets(self) -> tuple[int, ...]:
        """Buckets of context_encoding, in tokens."""
        return (16, LONGEST_PROMPT)[-self.num_buckets :]

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Buckets of token_generation, in tokens."""
        return (32, SEQ_LEN)[-self.num_buckets :]

    @property
    def edges(self) -> tuple[int, ...]:
        """Prompt lengths at and around every bucket's edge."""
        lengths = {1, LONGEST_PROMPT} | {bucket + offset for bucket in self.context_buckets for offset in (-1, 0, 1)}
        return tuple(sorted(length for length in lengths if 1 <= length <= LONGEST_PROMPT))

    @property
    def config(self) -> dict[str, Any]:
        """The InferenceConfig."""
        return {
            "neuron_config": {
                "tp_degree": self.tp_degree,
                "seq_len": SEQ_LEN,
                "max_context_length": LONGEST_PROMPT,
                "batch_size": 3,
                "torch_dtype": "float32",
                "enable_bucketing": True,
                "context_encoding_buckets": list(self.context_buckets),
                "token_generation_buckets": list(self.token_buckets),
                "is_continuous_batching": True,
                "ctx_batch_size": 1,
                "output_logits": self.has_logits,
                "on_device_sampling_config": {"global_topk": 32, "dynamic": True},
            }
        }


def all_cases() -> Iterator[Case]:
    """The whole matrix, cheapest first."""
    for level in LEVELS:
        for geometry in GEOMETRIES:
            for degree in DEGREES:
                selected = PAIRWISE.get((geometry, degree)) if level == 1 else None
                yield Case(geometry, degree, level, selected or 2)


def parameters() -> list[Any]:
    """The matrix as pytest parameters; what `make test` leaves out is marked slow."""
    return [pytest.param(case, id=case.name, marks=_marks(case)) for case in all_cases()]


def picking_parameters() -> list[Any]:
    """Bundles whose ranks pick tokens without gathering logits, each beside one of a single rank, as parameters."""
    chosen = (("padded-groups-bias", 2, 0), ("gqa4-tied-llama3", 4, 0), ("gqa4-tied-llama3", 2, 1))
    cases = [
        (Case(geometry, degree, level, 1, has_logits=False), Case(geometry, 1, level, 1, has_logits=False))
        for geometry, degree, level in chosen
    ]
    return [pytest.param(case, single, id=case.name, marks=_picking_marks(case)) for case, single in cases]


def _picking_marks(case: Case) -> list[pytest.MarkDecorator]:
    if case.level:
        return [pytest.mark.toolchain, pytest.mark.slow]
    return [] if case.geometry.startswith("padded") else [pytest.mark.slow]


def is_in_short_run(case: Case) -> bool:
    """Whether `make test` runs the case."""
    return case.level == 0 or (case.level == 1 and (case.geometry, case.tp_degree) in PAIRWISE)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.toolchain] if case.level else []
    return marks if is_in_short_run(case) else [*marks, pytest.mark.slow]
