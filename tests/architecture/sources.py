"""The source files of the repository, and what they import of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests.repository import ROOT

#: Packages that a server process, or a child of one, may load.
SERVING: Final = ("bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc")
#: Each package by the folder that it stands in.
PACKAGES: Final = {**dict.fromkeys((*SERVING, "bench"), ROOT), "kiln_client": ROOT / "clients/python"}

#: A module by its place: the folders around it, then its own name, which is `__init__` for that of a folder.
Place = tuple[str, ...]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_modules(packages: Mapping[str, Path] = PACKAGES) -> dict[Place, Path]:
    return {
        path.relative_to(directory).with_suffix("").parts: path
        for package, directory in packages.items()
        for path in sorted((directory / package).rglob("*.py"))
        if "build" not in path.parts
    }


def find_imported(path: Path, place: Place, modules: Mapping[Place, Path]) -> Iterator[Place]:
    """The modules of ours that a module imports. Imports inside of functions count, and so do those for types."""
    for node in ast.walk(parse(path)):
        names: list[Place] = []
        if isinstance(node, ast.Import):
            names = [tuple(one.name.split(".")) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = place[: -node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, one.name) for one in node.names]
        for name in names:
            # What is imported from a module is a module of its own, or stands in the module.
            candidates = (name, (*name, "__init__"), name[:-1], (*name[:-1], "__init__"))
            yield from [candidate for candidate in candidates if candidate in modules][:1]
