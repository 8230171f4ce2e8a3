"""Distributions from outside that bring families of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install_families(site: Path, modules: Mapping[str, str], families: Mapping[str, str]) -> Path:
    """Writes modules, and what pip would write of their distribution, camelid-family 1.2; returns the directory.

    Args:
        modules: Sources by name.
        families: `module:object` by name of the entry point.
    """
    metadata = site / "camelid_family-1.2.dist-info"
    metadata.mkdir(parents=True)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: camelid-family\nVersion: 1.2\n")
    entries = "".join(f"{name} = {value}\n" for name, value in families.items())
    (metadata / "entry_points.txt").write_text(f"[kiln.model_families]\n{entries}")
    return site
