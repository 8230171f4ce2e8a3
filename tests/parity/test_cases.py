"""The matrix is what it claims to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.errors import ConfigInvalid
from compiler_svc.models.registry import list_families
from targets.registry import TARGETS
from tests.parity.cases import (
    BESIDE_SHORT_RUN,
    DEGREES,
    FACTORS,
    LEVELS,
    LONG_RUN,
    REFUSED,
    SHORT_RUN,
    Case,
    all_cases,
    list_factors,
)
from tests.parity.geometries import ARCHITECTURES, GEOMETRIES, count_kv_heads, find_rope_type


def features(geometry: str) -> dict[str, object]:
    config = GEOMETRIES[geometry]
    return {
        "ratio": config["num_attention_heads"] // count_kv_heads(config),
        "tied": config["tie_word_embeddings"],
        "rope": find_rope_type(config),
    }


def test_geometries_cover_what_models_differ_in() -> None:
    covered = {name: {features(geometry)[name] for geometry in GEOMETRIES} for name in ("ratio", "tied", "rope")}
    assert {1, 2, 4, 8} <= covered["ratio"]
    assert covered["tied"] == {True, False}
    assert covered["rope"] == {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "none"}
    assert len(GEOMETRIES) >= 8
    assert any(config["num_attention_heads"] % 4 for config in GEOMETRIES.values())
    assert any(config["hidden_size"] % 4 for config in GEOMETRIES.values())
    assert all(config["vocab_size"] % 2 for config in GEOMETRIES.values())


#: The families of the first rows. They have most of what others are made of; `BESIDE_SHORT_RUN` has what they lack.
SHORT_FAMILIES = {f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")}


def list_missing(cases: Sequence[Case], names: Iterable[str]) -> list[dict[str, object]]:
    """Lists the pairs of values that no case has, and that the compiler takes."""
    rows = [list_factors(case) for case in cases]
    pairs = [
        {one: left, other: right}
        for one, other in combinations(names, 2)
        for left, right in product(FACTORS[one], FACTORS[other])
    ]
    refused = [one | other for one, other in REFUSED]
    return [pair for pair in pairs if pair not in refused and not any(pair.items() <= row.items() for row in rows)]


def test_the_covering_array_has_every_pair() -> None:
    """If a fault needs any two properties, one row has both."""
    assert list_missing([*SHORT_RUN, *BESIDE_SHORT_RUN, *LONG_RUN], FACTORS) == []


#: What one piece of code brings together: what steps pick from, and where chunks find the cache.
SHORT_PAIRS = (("padding_side", "sampling"), ("layout", "prompts"))


def test_the_short_run_has_every_value_and_the_pairs_that_meet() -> None:
    for names in SHORT_PAIRS:
        assert list_missing(SHORT_RUN, names) == []
    rows = [list_factors(case) for case in SHORT_RUN]
    for name, values in (FACTORS | {"family": SHORT_FAMILIES}).items():
        assert {row[name] for row in rows} == set(values)


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_pairs_that_the_array_leaves_out_are_refused(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options = pair[0] | pair[1]
    config = Case("mistral-window", 1, 0, **options).config
    if options.get("prompts") == "chunked":
        resolution = resolve_config(config, checkpoint_dtype=None, target="cpu")
        assert [text for text in resolution.warnings if "prompts longer than the last" in text]
        assert not TARGETS["cpu"].computes_chunks(resolution.config.neuron_config.padding_side)
    else:
        if options.get("layout") == "slots":
            config["neuron_config"]["is_block_kv_layout"] = False
        with pytest.raises(ConfigInvalid):
            resolve_config(config, checkpoint_dtype=None, target="cpu")


def test_the_short_run_compiles_little() -> None:
    assert len(SHORT_RUN) <= 6
    assert sum(case.num_libraries for case in SHORT_RUN if case.level) <= 4
    assert len(BESIDE_SHORT_RUN) <= 2
    assert not any(case.level for case in BESIDE_SHORT_RUN)


def test_every_family_and_degree_and_level_is_in_the_full_run() -> None:
    cases = {(case.geometry, case.tp_degree, case.level) for case in all_cases()}
    assert cases == set(product(GEOMETRIES, DEGREES, LEVELS))
    assert set(ARCHITECTURES.values()) == set(list_families())
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
