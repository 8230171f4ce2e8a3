"""What instruction sets this host has, in the names of the x86-64 psABI levels."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bundle.manifest import Manifest
from execution.errors import IsaUnsupported

#: CPU flags (as in /proc/cpuinfo) that each level adds to the one before it.
_LEVELS: Final = {
    "x86-64-v3": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}


def supported_isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Levels that every instruction of this host's CPUs covers, lowest first; empty on other architectures."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            flags = set(value.split())
            break
    supported = []
    for level, needed in _LEVELS.items():
        if not flags.issuperset(needed.split()):
            break
        supported.append(level)
    return tuple(supported)


def require_isa(manifest: Manifest, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Refuses a bundle whose native code this host cannot run; an exported program runs anywhere.

    Raises:
        IsaUnsupported: The host lacks the bundle's instruction set.
    """
    supported = supported_isas(cpuinfo)
    is_native = any(executable.format == "aoti" for executable in manifest.executables)
    if is_native and manifest.target.isa not in supported:
        raise IsaUnsupported(manifest.target.isa, supported)
