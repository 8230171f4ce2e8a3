"""Precompiled headers and common objects: 20 s of g++ for each set of flags, made once for all tests and later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.repository import ROOT

LOWERING_CACHE: Final = ROOT / ".kiln/lowering"


def share_lowering_cache(compiler_cache: Path) -> None:
    """Lets a compiler whose cache directory this is keep them where the others do.

    Which process makes a file first, or is killed while it does, changes nothing: they are whole or not there.
    """
    LOWERING_CACHE.mkdir(parents=True, exist_ok=True)
    compiler_cache.mkdir(parents=True, exist_ok=True)
    own = compiler_cache / "lowering"
    if not own.exists():
        own.symlink_to(LOWERING_CACHE)
