"""The matrix is what it claims to be."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations, product

from compiler_svc.models.registry import list_families
from tests.parity.cases import DEGREES, LEVELS, SHORT_RUN, all_cases
from tests.parity.geometries import ARCHITECTURES, GEOMETRIES


def features(geometry: str) -> dict[str, object]:
    config = GEOMETRIES[geometry]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "ratio": heads // kv_heads,
        "tied": config["tie_word_embeddings"],
        "rope": config["rope_parameters"]["rope_type"],
    }


def test_geometries_cover_what_models_differ_in() -> None:
    covered = {name: {features(geometry)[name] for geometry in GEOMETRIES} for name in ("ratio", "tied", "rope")}
    assert {1, 2, 4, 8} <= covered["ratio"]
    assert covered["tied"] == {True, False}
    assert covered["rope"] == {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
    assert len(GEOMETRIES) >= 8
    assert any(config["num_attention_heads"] % 4 for config in GEOMETRIES.values())
    assert any(config["hidden_size"] % 4 for config in GEOMETRIES.values())
    assert all(config["vocab_size"] % 2 for config in GEOMETRIES.values())


def test_the_short_run_covers_every_pair() -> None:
    """If a fault needs any two properties, one row has both."""
    values = {
        "family": set(ARCHITECTURES.values()),
        "tp_degree": set(DEGREES),
        "level": {0, 1},
        "padding_side": {"right", "left"},
        "sampling": {"device", "host"},
        "is_fused": {False, True},
    }
    rows = [{"family": ARCHITECTURES[case.geometry], **asdict(case)} for case in SHORT_RUN]
    for one, other in combinations(values, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(product(values[one], values[other])), (one, other)


def test_the_short_run_compiles_little() -> None:
    assert len(SHORT_RUN) <= 15
    assert sum(case.num_executables for case in SHORT_RUN if case.level) <= 12


def test_every_family_and_degree_and_level_is_in_the_full_run() -> None:
    cases = {(case.geometry, case.tp_degree, case.level) for case in all_cases()}
    assert cases == set(product(GEOMETRIES, DEGREES, LEVELS))
    assert set(ARCHITECTURES.values()) == set(list_families())
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
