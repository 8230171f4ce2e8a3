"""Which edits of our own sources void cached bundles."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from compiler_svc.lower.neuron.request import FRONT_ENDS
from compiler_svc.planning.code_digest import (
    BUNDLE_CODE,
    LOWERING_CODE,
    NEURON_LOWERING_CODE,
    digest_code,
    list_sources,
)
from compiler_svc.trace.submodel_document import MAKE_MODULE
from tests.architecture.sources import Place, find_imported, list_modules
from tests.repository import ROOT

#: What a build process runs, or imports, although no byte of a bundle depends on it: each with the reason.
WITHOUT_EFFECT = {
    "compiler_svc/config": "the resolved configuration is part of every key",
    "compiler_svc/database": "keeps results",
    "compiler_svc/errors.py": "errors leave no bundle",
    "compiler_svc/golden": "decides whether a bundle is published, and is recorded beside it",
    "compiler_svc/planning/adapters.py": "what it reads is part of every key",
    "compiler_svc/planning/code_digest.py": "is the key",
    "compiler_svc/planning/cost.py": "estimates times",
    "compiler_svc/planning/digest.py": "is a key of plans",
    "compiler_svc/planning/job_spec.py": "is the key",
    "compiler_svc/planning/model_roots.py": "finds files",
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
    "execution/visible_cores.py": "where ranks run, for the golden check",
    "targets/errors.py": "errors leave no bundle",
    "targets/isa.py": "the instruction set is part of every key",
    "targets/neuron.py": "nothing is made for it yet",
    "targets/neuron_releases.py": "versions are part of every key",
    "targets/registry.py": "finds what cpu.py states",
    "targets/target.py": "says what cpu.py can state",
    "targets/toolchain.py": "versions are part of every key",
}
#: The same of what the interpreter with Neuron's packages imports to make a NEFF.
WITHOUT_EFFECT_ON_NEFFS = {
    "bundle/digest.py": "is the key",
    "bundle/errors.py": "errors leave no NEFF",
    "bundle/host": "reads files and the environment",
    "bundle/manifest.py": "has the form of the document, which is the key",
    "compiler_svc/sharding": "its tensors are in the document, which is the key",
    "compiler_svc/weights": "its tensors are in the document, which is the key",
    "execution/failure.py": "errors leave no NEFF",
    "targets/cpu.py": "nothing of it is a NEFF's",
    "targets/errors.py": "errors leave no NEFF",
    "targets/isa.py": "nothing of it is a NEFF's",
    "targets/neuron_releases.py": "versions are part of every key",
    "targets/registry.py": "finds what neuron.py states",
    "targets/target.py": "says what neuron.py can state",
    "targets/toolchain.py": "versions are part of every key",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, to edit."""
    directory = tmp_path_factory.mktemp("sources")
    for package in ("bundle", "compiler_svc", "execution", "targets"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return directory


@pytest.mark.parametrize(
    ("path", "code", "voids"),
    [
        ("compiler_svc/models/layers/rope.py", BUNDLE_CODE, True),
        ("compiler_svc/lower/kernels/linear.cpp", BUNDLE_CODE, True),
        ("compiler_svc/lower/kernels/linear.cpp", LOWERING_CODE, True),
        ("compiler_svc/lower/kernels/vectors.h", LOWERING_CODE, True),
        ("bundle/abi/inputs.py", BUNDLE_CODE, True),
        ("targets/cpu.py", BUNDLE_CODE, True),
        ("compiler_svc/server.py", BUNDLE_CODE, False),
        ("compiler_svc/api/compiler.py", BUNDLE_CODE, False),
        ("compiler_svc/config/tables/documents.py", BUNDLE_CODE, False),
        ("compiler_svc/planning/cost.py", BUNDLE_CODE, False),
        ("execution/ranks/group.py", BUNDLE_CODE, False),
        ("targets/neuron.py", BUNDLE_CODE, False),
    ],
)
def test_an_edit_voids_what_was_made_if_it_shapes_bytes(
    sources: Path, path: str, code: tuple[str, ...], voids: bool
) -> None:
    digest_code.cache_clear()
    before = digest_code(code, sources)
    with (sources / path).open("a") as file:
        file.write("\n")
    digest_code.cache_clear()
    assert (digest_code(code, sources) != before) == voids


@pytest.mark.parametrize("code", [LOWERING_CODE, NEURON_LOWERING_CODE], ids=["cpu", "neuron"])
def test_an_edit_of_any_source_of_executables_misses_the_cache(sources: Path, code: tuple[str, ...]) -> None:
    digest_code.cache_clear()
    met = {digest_code(code, sources)}
    stale = []
    for file in list_sources(code, sources):
        file.write_bytes(file.read_bytes() + b"\n")
        digest_code.cache_clear()
        digest = digest_code(code, sources)
        stale += [file] if digest in met else []
        met.add(digest)
    assert len(met) > 10
    assert stale == []


def test_every_entry_exists() -> None:
    for source in (
        *BUNDLE_CODE,
        *LOWERING_CODE,
        *NEURON_LOWERING_CODE,
        *WITHOUT_EFFECT,
        *WITHOUT_EFFECT_ON_NEFFS,
    ):
        assert (ROOT / source).exists(), source
        assert list_sources((source,)), source


def test_all_that_a_build_imports_is_accounted_for() -> None:
    closure = _import_closure(("compiler_svc", "builds", "pipeline"))
    assert len(closure) > 100
    assert _list_unknown(closure, BUNDLE_CODE, WITHOUT_EFFECT) == []


def test_all_that_makes_neffs_is_accounted_for() -> None:
    """What the interpreter imports by a name in a request counts, too."""
    named = [*FRONT_ENDS.values(), MAKE_MODULE]
    starts = [tuple(name.partition(":")[0].split(".")) for name in named]
    closure = _import_closure(("compiler_svc", "lower", "neuron", "__main__"), *starts)
    assert ROOT / "compiler_svc/lower/neuron/largest.py" in closure
    assert _list_unknown(closure, NEURON_LOWERING_CODE, WITHOUT_EFFECT_ON_NEFFS) == []


def _list_unknown(closure: set[Path], code: tuple[str, ...], without_effect: Mapping[str, str]) -> list[str]:
    known = {*list_sources(code), *list_sources(tuple(without_effect))}
    return sorted(str(file.relative_to(ROOT)) for file in closure if file not in known and file.name != "__init__.py")


def _import_closure(*starts: Place) -> set[Path]:
    """The files of ours that modules import, directly or through others."""
    modules, waiting = list_modules(), [*starts]
    seen: set[Place] = set()
    while waiting:
        if (place := waiting.pop()) not in seen:
            seen.add(place)
            waiting.extend(find_imported(modules[place], place, modules))
    return {modules[place] for place in seen}
