"""The matrix is what it claims to be."""

from __future__ import annotations

from itertools import product

from tests.parity.cases import DEGREES, PAIRWISE, all_cases, is_in_short_run
from tests.parity.geometries import GEOMETRIES


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


def test_every_case_runs_without_a_toolchain() -> None:
    cases = [case for case in all_cases() if case.level == 0]
    assert {(case.geometry, case.tp_degree) for case in cases} == set(product(GEOMETRIES, DEGREES))
    assert all(is_in_short_run(case) and case.num_buckets == 2 for case in cases)


def test_the_compiled_selection_is_pairwise_and_small() -> None:
    selected = [case for case in all_cases() if case.level == 1 and is_in_short_run(case)]
    assert {(case.geometry, case.tp_degree) for case in selected} == PAIRWISE.keys()
    assert sum(case.num_executables for case in selected) <= 30
    pairs = {(name, features(case.geometry)[name], case.tp_degree) for case in selected for name in ("ratio", "tied")}
    assert {("ratio", ratio, degree) for ratio in (1, 2, 4, 8) for degree in DEGREES} <= pairs
    assert {("tied", tied, degree) for tied in (True, False) for degree in DEGREES} <= pairs
    padded = {
        (bool(GEOMETRIES[case.geometry]["num_attention_heads"] % case.tp_degree), case.tp_degree) for case in selected
    }
    assert {(True, 2), (True, 4), (False, 1), (False, 2), (False, 4)} <= padded
    assert {features(case.geometry)["rope"] for case in selected} == {
        features(geometry)["rope"] for geometry in GEOMETRIES
    }
    assert any(case.num_buckets == 2 for case in selected)
