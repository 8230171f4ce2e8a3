"""The validation table: each rule with a configuration that breaks it and one that keeps it."""

import pytest

from compiler_svc.config.rules import RULES, Rule
from tests.unit.compiler_svc.config.rules import general_cases, kernel_cases, speculation_cases
from tests.unit.compiler_svc.config.rules.rule_case import RuleCase

CASES = (*general_cases.CASES, *kernel_cases.CASES, *speculation_cases.CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_rule_is_told_and_a_kept_one_is_not(case: RuleCase) -> None:
    case.check()


@pytest.mark.parametrize("table", RULES)
def test_every_rule_has_a_case(table: str) -> None:
    rules, _ = RULES[table]
    with_cases: list[Rule] = [case.rule for case in CASES if case.table == table]
    missing = [rule for rule in rules if rule not in with_cases]
    assert not missing, f"no case for {[(rule.reads[0], rule.accepted) for rule in missing]}"


@pytest.mark.parametrize("table", RULES)
def test_every_rule_says_where_it_comes_from(table: str) -> None:
    rules, _ = RULES[table]
    for rule in rules:
        document, _, section = rule.section.partition(", ")
        assert document in ("NxD Inference API guide", "NxD Inference feature guide", "NxD Inference", "Kiln")
        assert section
