"""The digest of the compiler's own sources. Version numbers change only at releases; between releases, only the
sources tell that cached results are stale."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from bundle.digest import canonical_json, sha256_bytes, sha256_file
from compiler_svc.models.registry import list_registered

#: The folders and files that shape a bundle's bytes for a given resolved configuration, which every key has itself.
#: Edits elsewhere, such as in the service, the database or the prose of the configuration, keep cached bundles valid.
BUNDLE_CODE: Final = (
    "bundle",
    "compiler_svc/adapters",
    "compiler_svc/builds",
    "compiler_svc/config/buckets.py",
    "compiler_svc/config/interchange",
    "compiler_svc/config/submodels.py",
    "compiler_svc/lower",
    "compiler_svc/models",
    "compiler_svc/planning/build_plan.py",
    "compiler_svc/planning/bundled_model.py",
    "compiler_svc/planning/model_overrides.py",
    "compiler_svc/planning/sampling.py",
    "compiler_svc/sharding",
    "compiler_svc/trace",
    "compiler_svc/weights",
    "execution/adapters.py",
    "execution/attention",
    "execution/candidates.py",
    "execution/collectives",
    "execution/dtypes.py",
    "execution/logit_changes.py",
    "execution/noise.py",
    "execution/quantized_linear.py",
    "execution/sampling.py",
    "execution/sampling_parameters.py",
    "execution/text/bundle_text.py",
    "execution/text/chat_template.py",
    "execution/text/tokenizer.py",
    "targets/cpu.py",
)
#: Every source that an executable's bytes depend on for a given graph.
LOWERING_CODE: Final = ("compiler_svc/lower", "targets/cpu.py")
#: The same on Neuron targets, whose interpreter builds and traces the model again.
NEURON_LOWERING_CODE: Final = (
    "bundle/abi",
    "compiler_svc/lower",
    "compiler_svc/models",
    "compiler_svc/trace",
    "execution/adapters.py",
    "execution/attention",
    "execution/candidates.py",
    "execution/collectives",
    "execution/dtypes.py",
    "execution/logit_changes.py",
    "execution/noise.py",
    "execution/quantized_linear.py",
    "execution/sampling.py",
    "execution/sampling_parameters.py",
    "targets/neuron.py",
)

_KINDS: Final = ("*.py", "*.cpp", "*.h")
_ROOT: Final = Path(__file__).parents[2]


@cache
def digest_bundle_code() -> str:
    """Digests all code that shapes a bundle's bytes: our own, and the families that other distributions register. Of
    these only the version counts: clear the caches after an edit that keeps the version.
    """
    return sha256_bytes(canonical_json({"own": digest_code(BUNDLE_CODE), "registered": dict(list_registered())}))


@cache
def digest_code(sources: tuple[str, ...], root: Path = _ROOT) -> str:
    """Digests sources of this installation, Python and C++: files and whole folders, by paths relative to the root."""
    return sha256_bytes(
        canonical_json({str(file.relative_to(root)): sha256_file(file) for file in list_sources(sources, root)})
    )


def list_sources(sources: tuple[str, ...], root: Path = _ROOT) -> list[Path]:
    """Lists the files that `digest_code` reads, sorted by path."""
    files: set[Path] = set()
    for source in sources:
        path = root / source
        files.update([path] if path.is_file() else (file for kind in _KINDS for file in path.rglob(kind)))
    return sorted(files)
