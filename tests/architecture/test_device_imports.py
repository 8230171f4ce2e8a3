"""Tests that `make test` does not collect, since they need another torch, import what exists: a renaming shows here."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.repository import ROOT

OWN = {"bundle", "compiler_svc", "execution", "tests"}


@pytest.mark.parametrize("path", sorted((ROOT / "tests/device").rglob("*.py")), ids=lambda path: path.name)
def test_imported_names_exist(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    missing = [
        f"{node.module}.{one.name}"
        for node in imports
        if node.module and node.module.partition(".")[0] in OWN
        for one in node.names
        if not hasattr(importlib.import_module(node.module), one.name)
    ]
    assert missing == []
