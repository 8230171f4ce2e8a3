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
        if not has_name(node.module, one.name)
    ]
    assert missing == []


def has_name(module: str, name: str) -> bool:
    if not module.startswith("tests.device."):
        return hasattr(importlib.import_module(module), name)
    # It cannot be imported here, either.
    source = ROOT / f"{module.replace('.', '/')}.py"
    return name in {defined for node in ast.parse(source.read_text()).body for defined in list_defined(node)}


def list_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
