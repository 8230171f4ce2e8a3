"""Precompiled headers and common objects: 20 s of g++ for each set of flags, made once for all tests and later runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from bundle.manifest import Target
from compiler_svc.lower.job import PREBUILT
from targets.cpu import X86_64
from targets.isa import NATIVE
from tests.repository import ROOT

LOWERING_CACHE: Final = ROOT / ".kiln/lowering"
#: What tests lower for, unless they say why not: of other levels than this host's, `make setup` compiles nothing.
HOST: Final = Target(kind="cpu", isa=X86_64.resolve(NATIVE))


def share_lowering_cache(compiler_cache: Path) -> None:
    """Lets a compiler with this cache directory share the files of all other tests, and those of `make setup`, which
    another installation of the compiler would make again.

    Any process may make a file first, or be killed while it does: a file is whole or missing.
    """
    for path in PREBUILT.glob("*/*"):
        shared = LOWERING_CACHE / path.relative_to(PREBUILT)
        shared.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            shared.symlink_to(path)
    LOWERING_CACHE.mkdir(parents=True, exist_ok=True)
    compiler_cache.mkdir(parents=True, exist_ok=True)
    own = compiler_cache / "lowering"
    if not own.exists():
        own.symlink_to(LOWERING_CACHE)
