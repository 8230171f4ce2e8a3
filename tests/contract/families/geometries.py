"""The suite's cases of each family: those of `make test`, and all of the long run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.checkpoints.families import FAMILIES

#: What `make test` runs for every family: what it reads, what it states of the checkpoint, its graphs, their numbers,
#: its adapters.
#: `ShownFamily.shows` says what else; families with every trait show all.
EVERY_FAMILY: Final = (
    "test_the_attributes_that_count_are_those_that_are_read",
    "test_defaults_are_those_of_transformers",
    "test_attributes_that_shape_the_weights_are_required",
    "test_description_is_what_the_checkpoint_stores",
    "test_heads_are_found_under_the_names_of_checkpoints",
    "test_digests_are_those_that_are_pinned",
    "test_64_greedy_tokens",
    "test_ranks_compute_what_transformers_computes",
    "test_ranks_hold_what_peft_merges",
)
#: Exported graphs of every family are pinned by their digests, and run by parity: `make test` runs those of one here.
OF_ONE_FAMILY: Final = ("test_64_greedy_tokens_of_exported_graphs", "test_exported_graphs_serve_every_rank")


@dataclass(frozen=True)
class Geometry:
    """One model of a family."""

    architecture: str
    name: str

    def __str__(self) -> str:
        return f"{self.architecture.removesuffix('ForCausalLM')}-{self.name}"

    @property
    def attributes(self) -> dict[str, Any]:
        return FAMILIES[self.architecture].geometries[self.name]


GEOMETRIES: Final = [
    Geometry(architecture, name) for architecture in FAMILIES for name in FAMILIES[architecture].geometries
]
#: The first of each family.
FIRST: Final = list({one.architecture: one for one in reversed(GEOMETRIES)}.values())[::-1]


def is_shown(architecture: str, case: str) -> bool:
    """Whether `make test` runs a case for a family."""
    if case in OF_ONE_FAMILY:
        return architecture == FIRST[0].architecture
    shows = FAMILIES[architecture].shows
    return shows is None or case in (*EVERY_FAMILY, *shows)


def parameters(case: str, attribute: str | None = None) -> list[Any]:
    """The geometries of a case, as pytest parameters; those that `make test` leaves out are marked slow.

    Args:
        attribute: Leaves out geometries that do not have it.
    """
    return [
        pytest.param(
            one, id=str(one), marks=[] if one in FIRST and is_shown(one.architecture, case) else [pytest.mark.slow]
        )
        for one in GEOMETRIES
        if attribute is None or one.attributes.get(attribute) is not None
    ]
