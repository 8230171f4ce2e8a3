"""A file is large enough to be one, and small enough to be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, find_imported, list_modules
from tests.repository import ROOT

MAX_LINES = 400
#: A file of so many lines belongs into the only file that imports it.
SMALL_LINES = 60

#: Why a file stays one all the same.
EXCEPTIONS = {
    "bench/work.py": "what is counted; `goals` says what it should be",
    "clients/python/kiln_client/stack/environment.py": "a table of data, as `bundle/host/environment.py` is",
    "clients/python/kiln_client/stack/tether.py": "a program",
    "compiler_svc/database/file_digests.py": "a table of the database, whose contract suite tests it",
    "compiler_svc/metrics.py": "the metrics of a service are where those of the other are",
    "compiler_svc/models/layers/alibi.py": "what models compute, which shards write as weights",
    "compiler_svc/weights/model_card.py": "a file format",
    "execution/collectives/memory.py": "the parent's side, which must not import torch",
    "execution/executors/neuron/host.py": "a program",
    "runtime_svc/captures/capture_file.py": "a file format",
    "runtime_svc/engine/assembly.py": "what a manifest makes of a scheduler, which tests drive without an engine",
}


def find_crumbs(packages: Mapping[str, Path]) -> Iterator[tuple[Path, Path]]:
    """Each small file that one other file imports, and that file. Files of no importer are programs."""
    modules = list_modules(packages)
    importers: dict[Path, set[Path]] = defaultdict(set)
    for place, path in modules.items():
        for imported in find_imported(path, place, modules):
            importers[modules[imported]].add(path)
    for path, found in importers.items():
        if path.name != "__init__.py" and len(found - {path}) == 1 and count_lines(path) <= SMALL_LINES:
            yield path, *(found - {path})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_small_files_have_several_importers() -> None:
    crumbs = {name_of(crumb): name_of(importer) for crumb, importer in find_crumbs(PACKAGES)}
    refused = {crumb: importer for crumb, importer in crumbs.items() if crumb not in EXCEPTIONS}
    assert refused == {}, "join each with its only importer, or say in EXCEPTIONS why not"
    assert EXCEPTIONS.keys() <= crumbs.keys(), "an exception no longer applies"


def test_no_file_is_long() -> None:
    lines = {name_of(path): count_lines(path) for path in list_modules().values()}
    assert {name for name, count in lines.items() if count > MAX_LINES} == set()


@pytest.mark.parametrize(
    ("sources", "crumbs"),
    [
        pytest.param({"a.py": "import p.b", "b.py": ""}, ["b.py"], id="one-importer"),
        pytest.param({"a.py": "from p import b", "b.py": "", "c.py": "from .b import x"}, [], id="two-importers"),
        pytest.param({"a.py": "import p.b", "b.py": "\n" * SMALL_LINES}, ["b.py"], id="just-small"),
        pytest.param({"a.py": "import p.b", "b.py": "\n" * (SMALL_LINES + 1)}, [], id="large"),
        pytest.param({"a.py": ""}, [], id="a-program"),
        pytest.param({"a.py": "import p.b", "b/__init__.py": ""}, [], id="a-folder"),
    ],
)
def test_the_check_finds_small_files(tmp_path: Path, sources: dict[str, str], crumbs: list[str]) -> None:
    for name, source in ({"__init__.py": ""} | sources).items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(source)
    assert [crumb.name for crumb, _ in find_crumbs({"p": tmp_path})] == crumbs
