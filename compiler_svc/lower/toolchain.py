"""Versions of everything that shapes an executable besides its graph and options."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

from compiler_svc.lower.errors import ToolchainMissing

COMPILER: Final = "g++"


def toolchain(optimization_level: int) -> dict[str, str]:
    """Versions by name, for cache keys and manifests. Level 0 needs and names no C++ compiler.

    Raises:
        ToolchainMissing: There is no C++ compiler, above level 0.
    """
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    if optimization_level > 0:
        command = [str(find_compiler()), "-dumpfullversion"]
        versions[COMPILER] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return versions


def find_compiler() -> Path:
    """Path of the C++ compiler.

    Raises:
        ToolchainMissing: There is none.
    """
    path = shutil.which(COMPILER)
    if path is None:
        raise ToolchainMissing(COMPILER)
    return Path(path)
