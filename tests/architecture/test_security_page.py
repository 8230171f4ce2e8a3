"""docs/security.md names tests that exist, and has a row for every attack that got through an earlier release."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.repository import ROOT

PAGE = (ROOT / "docs/security.md").read_text()

#: Attack, defence and tests of each row; other tables name no tests.
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (`tests/[^|]+) \|$", PAGE, re.MULTILINE)

#: What got through when Kiln was attacked. Each begins a row.
PAST_ATTACKS = (
    "Endless work in a configuration",
    "A hostile chat template",
    "A hostile or broken tokenizer",
    "A load that takes the runtime down at every start",
    "One huge message",
    "A prompt whose logits are no numbers",
    "A rank that hangs or dies",
    "A forkserver or build that hangs",
    "Silence",
    "Shortage of descriptors, memory or disk",
    "Leftovers of cancelled and killed work",
    "Odd messages",
    "Weights that are no numbers",
    "Changed or lost bytes in a store",
    "A file that is written in place while ranks map it",
    "Calls without the right",
    "Reading the home",
    "Learning about the host from errors and reflection",
    "Many connections, streams or calls",
)


def named_tests() -> Iterator[str]:
    for _, _, tests in ROWS:
        yield from re.findall(r"`([^`]+)`", tests)


@cache
def definitions_of(path: str) -> frozenset[str]:
    """Names of the functions and classes of a file, at any depth."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds))


def is_test(name: str) -> bool:
    path, _, function = name.partition("::")
    return (ROOT / path).is_file() and function.lower().startswith("test") and function in definitions_of(path)


def test_named_tests_exist() -> None:
    assert sorted({name for name in named_tests() if not is_test(name)}) == []


def test_every_row_names_its_tests() -> None:
    tables = PAGE.partition("## What clients try")[2].partition("## What Kiln does not protect against")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| attack |")]
    assert len(rows) == len(ROWS) > 30, "a row names tests, or one has more columns"


def test_every_past_attack_has_a_row() -> None:
    assert [attack for attack in PAST_ATTACKS if not any(row[0].startswith(attack) for row in ROWS)] == []
