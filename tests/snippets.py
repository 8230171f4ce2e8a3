"""Code that a test runs in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.repository import ROOT


def run_python(
    code: str, *arguments: object, site: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs code, which must come to its end, with the modules of this tree.

    Args:
        site: A directory of modules that it finds besides.
        variables: Of its environment.
    """
    search_path = [str(path) for path in (site, ROOT, ROOT / "protos") if path is not None]
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result
