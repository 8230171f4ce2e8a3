"""The digest of our own sources: versions change at releases, and between two of them only the sources tell that
cached results are stale."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from bundle.digest import canonical_json, sha256_bytes, sha256_file

#: All that a bundle's bytes depend on.
BUNDLE_CODE: Final = ("bundle", "compiler_svc", "execution")
#: All that an executable's bytes depend on, its graph given.
LOWERING_CODE: Final = ("compiler_svc/lower",)

_KINDS: Final = ("*.py", "*.cpp")
_ROOT: Final = Path(__file__).parents[2]


@cache
def digest_code(folders: tuple[str, ...]) -> str:
    """Digest of the sources in some folders of this installation: Python, and the C++ of kernels."""
    files = sorted(file for folder in folders for kind in _KINDS for file in (_ROOT / folder).rglob(kind))
    return sha256_bytes(canonical_json({str(file.relative_to(_ROOT)): sha256_file(file) for file in files}))
