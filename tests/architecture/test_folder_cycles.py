"""No folder cycle: what stands in one folder builds on each other in one direction, at every depth of every package.

Sub-folders and modules of a folder are ordered together. So `config/attribute.py` may be the ground of `config/rules`,
on which `config/validator.py` builds; but nothing builds on what builds on it, on any detour. The `__init__` of a
folder is one of its modules: it may give names of sub-folders unless these take names from it. Imports inside of
functions count, and so do those for types.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Each package by the folder that it stands in.
PACKAGES = {
    **dict.fromkeys(("bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc", "bench"), ROOT),
    "kiln_client": ROOT / "clients/python",
}

#: A module by its place: the folders around it, then its own name, which is `__init__` for that of a folder.
Place = tuple[str, ...]
#: By folder: what each node, a module or folder that stands in it, imports of the other nodes.
Arrows = Mapping[Place, Mapping[Place, set[Place]]]


def list_modules(packages: Mapping[str, Path]) -> dict[Place, Path]:
    return {
        path.relative_to(directory).with_suffix("").parts: path
        for package, directory in packages.items()
        for path in sorted((directory / package).rglob("*.py"))
    }


def find_imported(path: Path, place: Place, modules: Mapping[Place, Path]) -> Iterator[Place]:
    """The modules of ours that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
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


def draw_arrows(packages: Mapping[str, Path]) -> Arrows:
    modules = list_modules(packages)
    arrows: dict[Place, dict[Place, set[Place]]] = defaultdict(lambda: defaultdict(set))
    for place, path in modules.items():
        for imported in find_imported(path, place, modules):
            depth = next((n for n, (own, other) in enumerate(zip(place, imported, strict=False)) if own != other), None)
            if depth is not None:
                arrows[place[:depth]][place[: depth + 1]].add(imported[: depth + 1])
    return arrows


def find_cycles(packages: Mapping[str, Path]) -> list[str]:
    """One cycle of each folder that has any, such as `a.x imports a.y imports a.x`."""
    cycles = []
    for nodes in draw_arrows(packages).values():
        try:
            TopologicalSorter(nodes).prepare()
        except CycleError as error:
            # The sorter lists the imported node first.
            cycles.append(" imports ".join(".".join(node) for node in reversed(error.args[1])))
    return cycles


def test_no_folder_has_a_cycle() -> None:
    assert {place[0] for place in list_modules(PACKAGES)} == PACKAGES.keys(), "every package has modules"
    assert find_cycles(PACKAGES) == []


@pytest.mark.parametrize(
    ("sources", "cycles"),
    [
        pytest.param({"a/x.py": "from p.b import y", "b/y.py": "import q"}, [], id="one-way"),
        pytest.param(
            {"a/x.py": "from p.b import y", "b/y.py": "def f():\n    import p.a.z", "a/z.py": ""},
            ["p.a imports p.b imports p.a"],
            id="two-folders-by-other-modules",
        ),
        pytest.param(
            {"a/x.py": "from p.b.y import Y", "b/y.py": "from ..c.z import Z", "c/z.py": "from p import a"},
            ["p.a imports p.b imports p.c imports p.a"],
            id="a-detour",
        ),
        pytest.param(
            {"top.py": "import p.a.x", "a/x.py": "import p.ground", "ground.py": ""},
            [],
            id="ground-and-top",
        ),
        pytest.param(
            {"top.py": "import p.a.x", "a/x.py": "import p.ground", "ground.py": "import p.top"},
            ["p.a imports p.ground imports p.top imports p.a"],
            id="a-folder-on-what-builds-on-it",
        ),
        pytest.param(
            {"__init__.py": "from p.a.x import X", "a/x.py": "from p.ground import Y", "ground.py": ""},
            [],
            id="names-given-by-init",
        ),
        pytest.param(
            {"__init__.py": "from p.a.x import X", "a/x.py": "from p import Y"},
            ["p.__init__ imports p.a imports p.__init__"],
            id="names-taken-from-init",
        ),
        pytest.param(
            {"a/b/c/x.py": "import p.a.d.y", "a/d/y.py": "import p.a.b.z", "a/b/z.py": ""},
            ["p.a.b imports p.a.d imports p.a.b"],
            id="deep-inside",
        ),
    ],
)
def test_the_check_finds_cycles(tmp_path: Path, sources: dict[str, str], cycles: list[str]) -> None:
    for name, source in ({"__init__.py": "", "a/__init__.py": ""} | sources).items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(source)
    assert [turn(cycle) for cycle in find_cycles({"p": tmp_path})] == [turn(cycle) for cycle in cycles]


def turn(cycle: str) -> list[str]:
    """The nodes of a cycle, from its first one by name."""
    nodes = cycle.split(" imports ")[:-1]
    first = nodes.index(min(nodes))
    return nodes[first:] + nodes[:first]
