"""The file that `kiln doctor --report` writes, for those who are to find out why a check failed."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

#: What the services of a trial leave of which a report has all: their logs, graphs, and what the compiler wrote.
_FILES: Final = ("*.log", "log*.txt", "graph.hlo", "metaneff.pb", "command.txt")
#: Prefixes of the variables whose values a report has. Those of all others may be secrets.
_TOLD_VARIABLES: Final = ("NEURON_", "XLA_", "PJRT_", "KILN_COMPILER_NEURON_", "LD_LIBRARY_PATH", "PATH")
#: Parts of names whose values are never told.
_SECRET: Final = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL", "AUTH")
_MAX_FILE_BYTES: Final = 64 << 20


def write_report(path: Path, directory: Path, result: Mapping[str, Any]) -> None:
    """Writes a report, a gzipped tar that only its owner may read.

    Args:
        directory: What the services of the trial wrote.
        result: What every check found, values of JSON.

    Raises:
        OSError: The file cannot be written.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, "result.json", json.dumps(result, indent=2).encode())
        _add(archive, "host.json", json.dumps(_describe_host(), indent=2).encode())
        for found in sorted({found for pattern in _FILES for found in directory.rglob(pattern)}):
            if found.is_file() and not found.is_symlink():
                with found.open("rb") as content:
                    _add(archive, f"files/{found.relative_to(directory)}", content.read(_MAX_FILE_BYTES))


def _describe_host() -> Mapping[str, Any]:
    return {
        "system": " ".join((os.uname().sysname, os.uname().release, os.uname().machine)),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "variables": dict(sorted(_list_variables(os.environ))),
    }


def _list_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if name.startswith(_TOLD_VARIABLES) and not any(part in name.upper() for part in _SECRET):
            yield name, value


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o600
    archive.addfile(entry, io.BytesIO(content))
