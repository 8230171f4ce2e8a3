"""Every attribute that the cpu target honours has a test that shows what it does."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler_svc.config.tables import TABLES
from tests.compiler_svc.config.honoured import SHOWN_BY

ROOT = Path(__file__).parents[3]


def test_the_list_is_complete() -> None:
    honoured = {
        f"{table.class_name}.{attribute.name}"
        for table in TABLES.values()
        for attribute in table.rows
        if attribute.support_on("cpu").level == "honoured" and not attribute.deprecated
    }
    assert honoured == SHOWN_BY.keys()


@pytest.mark.parametrize("node", sorted(set(SHOWN_BY.values())))
def test_the_test_exists(node: str) -> None:
    """Read off the source: collecting them would load torch."""
    path, _, test = node.partition("::")
    name, _, case = test.removesuffix("]").partition("[")
    body = ast.parse((ROOT / path).read_text()).body
    functions = [one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name]
    assert functions, node
    assert not case or case in cases(functions[0]), node


def cases(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Names of a test's cases: those that are given, and those that pytest makes of plain values."""
    decorators = [one for one in function.decorator_list if isinstance(one, ast.Call) and len(one.args) == 2]
    lists = [one.args[1].elts for one in decorators if isinstance(one.args[1], ast.List)]
    for case in itertools.chain.from_iterable(lists):
        if isinstance(case, ast.Call):
            yield from (ast.literal_eval(word.value) for word in case.keywords if word.arg == "id")
        else:
            values = ast.literal_eval(case)
            yield "-".join(map(str, values if isinstance(values, tuple) else (values,)))
