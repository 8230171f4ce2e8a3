"""The record of what graphs consist of: operations and types with their numbers, a line for each graph.

`python3.11 -m tests.device.xla -k recorded --write-records` writes it anew. The commit that changes graphs shows what
it changes in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.device.xla.graphs import Graph
from tests.device.xla.hlo import count

PATH: Final = Path(__file__).parent / "graphs.txt"


class Records:
    """Compares graphs with their records, or records them."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes

    def check(self, name: str, graph: Graph) -> None:
        """Fails if a graph differs from its record, or has none."""
        lines, found = read_records(), count(graph.instructions)
        if self._writes:
            PATH.write_text("".join(f"{key}: {line}\n" for key, line in sorted((lines | {name: found}).items())))
        else:
            assert found == lines.get(name, "no record")


def read_records() -> dict[str, str]:
    """The lines by the names of their graphs."""
    return dict(line.split(": ", 1) for line in PATH.read_text().splitlines()) if PATH.exists() else {}
