"""Builds the stand-in for libnrt, and says what environment a process needs to load it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

SOURCES: Final = Path(__file__).parent / "libnrt"
LIBRARY: Final = "libnrt.so.1"


def read_signatures() -> dict[str, Any]:
    """The functions and statuses of AWS's headers, as they were recorded."""
    signatures: dict[str, Any] = json.loads((SOURCES / "signatures.json").read_text())
    return signatures


def build_stand_in(directory: Path) -> Path:
    """Compiles the library against prototypes of the recorded signatures; returns its path."""
    prototypes = [
        f"{one['returns']} {one['name']}({', '.join(one['arguments']) or 'void'});"
        for one in read_signatures()["functions"]
    ]
    (directory / "recorded.h").write_text("\n".join([*prototypes, ""]))
    path = directory / LIBRARY
    command = ["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{directory}"]
    command += [f"-Wl,-soname,{LIBRARY}", *map(str, sorted(SOURCES.glob("*.c"))), "-lm", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


def make_environment(library: Path, directory: Path, *, num_cores: int = 2) -> dict[str, str]:
    """Describes a host with cores to a process.

    Args:
        library: What `build_stand_in` returned.
        directory: Stands for the host: processes with the same one share its cores.
    """
    (directory / "dev").mkdir(parents=True, exist_ok=True)
    found = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(library.parent), *([found] if found else [])]),
        "NEURON_STAND_IN_DIRECTORY": str(directory),
        "NEURON_STAND_IN_CORES": str(num_cores),
        "NEURON_STAND_IN_FAULTS": str(directory / "faults"),
    }
