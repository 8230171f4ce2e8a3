"""docs/request.md names files and functions that exist, for ten steps of a Generate."""

from __future__ import annotations

import ast
import re

import pytest

from tests.repository import ROOT

PAGE = (ROOT / "docs/request.md").read_text()

#: Places as the page names them: `folder/file.py:function`, or `folder/file.py:Class.method`.
PLACES = re.findall(r"`([\w/]+\.py:[\w.]+)`", PAGE)


def list_functions(path: str) -> set[str]:
    """Names of the functions of a file, and of the methods of its classes as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {f"{owner.name}.{node.name}" for owner in classes for node in owner.body if isinstance(node, kinds)}
    return methods | {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("place", PLACES)
def test_places_exist(place: str) -> None:
    path, _, function = place.partition(":")
    assert (ROOT / path).is_file()
    assert function in list_functions(path)


def test_every_step_names_a_place() -> None:
    for title, num_steps in (("Generate, in ten steps", 10), ("Compile", 5)):
        section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (\d+) [^|]+\| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
        assert [int(number) for number, _ in rows] == list(range(1, num_steps + 1))
        assert all(re.search(r"`[\w/]+\.py:[\w.]+`", places) for _, places in rows)
