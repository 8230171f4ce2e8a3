"""Checks whether this host can run a bundle's executables."""

from __future__ import annotations

from pathlib import Path

from bundle.manifest import Manifest
from targets.isa import CPUINFO
from targets.registry import TARGETS, find_format


def require_isa(manifest: Manifest, cpuinfo: Path = CPUINFO) -> None:
    """Refuses a bundle whose native code this host cannot run. Exported programs run on any host."""
    formats = {executable.format for executable in manifest.executables}
    if any(find_format(name).is_native for name in formats):
        TARGETS[manifest.target.kind].isas.require(manifest.target.isa, cpuinfo)
