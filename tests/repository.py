"""The repository that the tests are of."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@cache
def list_tracked(*patterns: str) -> tuple[str, ...]:
    """The files of the work tree that git tracks or would, by patterns of paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted({name for name in listed if (ROOT / name).exists()}))
