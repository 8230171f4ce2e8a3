"""The cases are the covering array that they claim to be."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from compiler_svc.models.registry import list_families
from tests.device.xla.cases import CASES, DTYPES, LAYOUTS, PADDINGS, PICKS

CHOICES = {"pick": set(PICKS), "padding_side": set(PADDINGS), "layout": set(LAYOUTS), "dtype": set(DTYPES)}


def test_each_family_has_two_cases_and_both_of_what_has_two() -> None:
    assert Counter(case.architecture for case in CASES) == dict.fromkeys(list_families(), 2)
    for name in ("padding_side", "layout", "dtype"):
        seen = {(case.architecture, getattr(case, name)) for case in CASES}
        assert seen == set(product(list_families(), CHOICES[name])), name


def test_each_pair_of_choices_has_a_case() -> None:
    for one, other in combinations(CHOICES, 2):
        seen = {(getattr(case, one), getattr(case, other)) for case in CASES}
        assert seen == set(product(CHOICES[one], CHOICES[other])), (one, other)


def test_each_way_has_a_case() -> None:
    seen = {(case.pick, case.padding_side, case.layout, case.dtype) for case in CASES}
    assert seen == set(product(*CHOICES.values()))
