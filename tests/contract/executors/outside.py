"""Distributions from outside, as far as they are metadata: what is installed of one is what it calls itself."""

from __future__ import annotations

from pathlib import Path

from targets.registry import ENTRY_POINT_GROUP


def install(directory: Path, entry_points: dict[str, str], distribution: str = "kiln_toy") -> None:
    """Writes what pip would write of a distribution whose modules lie elsewhere.

    Args:
        directory: On the path that modules are found on.
        entry_points: `module:object` by name of the format.
    """
    metadata = directory / f"{distribution}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
