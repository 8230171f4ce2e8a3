"""No folder cycle: what stands in one folder builds on each other in one direction, at every depth of every package.

Sub-folders and modules of a folder are ordered together. So `config/attribute.py` may be the ground of `config/tables`,
on which `config/validator.py` builds; but nothing builds on what builds on it, on any detour. The `__init__` of a
folder is one of its modules: it may give names of sub-folders unless these take names from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, Place, find_imported, list_modules

#: By folder: what each node, a module or folder that stands in it, imports of the other nodes.
Arrows = Mapping[Place, Mapping[Place, set[Place]]]


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
    assert {place[0] for place in list_modules()} == PACKAGES.keys(), "every package has modules"
    assert find_cycles(PACKAGES) == []


#: Sources of a package, and the cycle of one of its folders.
CASES = {
    "one-way": ({"a/x.py": "from p.b import y", "b/y.py": "import q"}, ""),
    "two-folders-by-other-modules": (
        {"a/x.py": "from p.b import y", "b/y.py": "def f():\n    import p.a.z", "a/z.py": ""},
        "p.a imports p.b imports p.a",
    ),
    "a-detour": (
        {"a/x.py": "from p.b.y import Y", "b/y.py": "from ..c.z import Z", "c/z.py": "from p import a"},
        "p.a imports p.b imports p.c imports p.a",
    ),
    "ground-and-top": ({"top.py": "import p.a.x", "a/x.py": "import p.ground", "ground.py": ""}, ""),
    "a-folder-on-what-builds-on-it": (
        {"top.py": "import p.a.x", "a/x.py": "import p.ground", "ground.py": "import p.top"},
        "p.a imports p.ground imports p.top imports p.a",
    ),
    "names-given-by-init": ({"__init__.py": "from p.a.x import X", "a/x.py": "from p.b import Y", "b.py": ""}, ""),
    "names-taken-from-init": (
        {"__init__.py": "from p.a.x import X", "a/x.py": "from p import Y"},
        "p.__init__ imports p.a imports p.__init__",
    ),
    "deep-inside": (
        {"a/b/c/x.py": "import p.a.d.y", "a/d/y.py": "import p.a.b.z", "a/b/z.py": ""},
        "p.a.b imports p.a.d imports p.a.b",
    ),
}


@pytest.mark.parametrize(("sources", "cycle"), CASES.values(), ids=CASES)
def test_the_check_finds_cycles(tmp_path: Path, sources: dict[str, str], cycle: str) -> None:
    for name, source in ({"__init__.py": "", "a/__init__.py": ""} | sources).items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(source)
    assert [*map(turn, find_cycles({"p": tmp_path}))] == ([turn(cycle)] if cycle else [])


def turn(cycle: str) -> list[str]:
    """The nodes of a cycle, from its first one by name."""
    nodes = cycle.split(" imports ")[:-1]
    first = nodes.index(min(nodes))
    return nodes[first:] + nodes[:first]
