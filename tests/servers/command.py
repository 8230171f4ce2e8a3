"""Client code in processes of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.repository import ROOT

KILN = [sys.executable, "-m", "kiln_client"]


def python_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Environment of a process that imports the client of this tree, and first of all what `folders` hold."""
    search_path = [*folders, ROOT / "clients/python", ROOT / "protos"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, search_path))} | variables
