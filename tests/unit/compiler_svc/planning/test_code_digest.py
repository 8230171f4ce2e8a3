"""Which edits of our own sources void cached bundles."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from compiler_svc.planning.code_digest import BUNDLE_CODE, LOWERING_CODE, digest_code, list_sources
from tests.repository import ROOT

#: What a build process runs, or imports, although no byte of a bundle depends on it: each with the reason.
WITHOUT_EFFECT = {
    "compiler_svc/config": "the resolved configuration is part of every key",
    "compiler_svc/database": "keeps results",
    "compiler_svc/errors.py": "errors leave no bundle",
    "compiler_svc/golden": "decides whether a bundle is published, and is recorded beside it",
    "compiler_svc/planning/code_digest.py": "is the key",
    "compiler_svc/planning/cost.py": "estimates times",
    "compiler_svc/planning/digest.py": "is a key of plans",
    "compiler_svc/planning/job_spec.py": "is the key",
    "compiler_svc/planning/weights_fit.py": "refuses weights, and makes none",
    "compiler_svc/records.py": "what clients are told",
    "edge": "is about servers",
    "execution/device_errors.py": "errors leave no bundle",
    "execution/errors.py": "errors leave no bundle",
    "execution/executors": "runs executables, for the golden check",
    "execution/failure.py": "errors leave no bundle",
    "execution/forkserver": "starts processes",
    "execution/isa.py": "refuses bundles, and makes none",
    "execution/ranks": "runs executables, for the golden check",
    "execution/shared_memory.py": "runs executables, for the golden check",
    "execution/stall.py": "ends processes that hang",
    "execution/step.py": "runs executables, for the golden check",
    "execution/text": "tries the tokenizer and the chat template, and changes neither",
    "execution/threads.py": "how many threads run",
    "targets/errors.py": "errors leave no bundle",
    "targets/isa.py": "the instruction set is part of every key",
    "targets/neuron.py": "nothing is made for it yet",
    "targets/registry.py": "finds what cpu.py states",
    "targets/target.py": "says what cpu.py can state",
    "targets/toolchain.py": "versions are part of every key",
}


@pytest.mark.parametrize(
    "path",
    [
        "compiler_svc/models/layers/rope.py",
        "compiler_svc/lower/kernels/linear.cpp",
        "bundle/abi/inputs.py",
        "targets/cpu.py",
    ],
)
def test_an_edit_of_what_shapes_bytes_voids_bundles(tmp_path: Path, path: str) -> None:
    before, after = _edit(tmp_path, path)
    assert before != after


@pytest.mark.parametrize(
    "path",
    [
        "compiler_svc/server.py",
        "compiler_svc/api/compiler.py",
        "compiler_svc/config/tables/differences.py",
        "compiler_svc/planning/cost.py",
        "execution/ranks/group.py",
        "targets/neuron.py",
    ],
)
def test_an_edit_elsewhere_voids_none(tmp_path: Path, path: str) -> None:
    before, after = _edit(tmp_path, path)
    assert before == after


def test_every_entry_exists() -> None:
    for source in (*BUNDLE_CODE, *LOWERING_CODE, *WITHOUT_EFFECT):
        assert (ROOT / source).exists(), source
        assert list_sources((source,)), source


def test_all_that_a_build_imports_is_accounted_for() -> None:
    known = {*list_sources(BUNDLE_CODE), *list_sources(tuple(WITHOUT_EFFECT))}
    closure = _import_closure(ROOT / "compiler_svc/builds/pipeline.py")
    assert len(closure) > 100
    assert not sorted(
        str(file.relative_to(ROOT)) for file in closure if file not in known and file.name != "__init__.py"
    )


def _edit(directory: Path, path: str) -> tuple[str, str]:
    """Digests of a copy of the sources before and after a comment is added to one of them."""
    for package in ("bundle", "compiler_svc", "execution", "targets"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    before = digest_code(BUNDLE_CODE, directory)
    with (directory / path).open("a") as file:
        file.write("\n")
    digest_code.cache_clear()
    return before, digest_code(BUNDLE_CODE, directory)


def _import_closure(start: Path) -> set[Path]:
    """The files of ours that a module imports, directly or through others."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting.extend(_imported_files(file))
    return seen


def _imported_files(file: Path) -> list[Path]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    paths = (ROOT / name.replace(".", "/") for name in names)
    candidates = [candidate for path in paths for candidate in (path.with_suffix(".py"), path / "__init__.py")]
    return [candidate for candidate in candidates if candidate.is_file()]
