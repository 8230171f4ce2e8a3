"""Rings: what tests start, from nothing at all to a whole stack.

The folder of a test says its ring, so that `make check` can run those that start nothing, and a run can say how long
each ring took.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.repository import ROOT

#: Folder -> what its tests start. A run begins with those that take longest, so that no long file is left for the end.
RINGS: Final = {
    "parity": "both services, and transformers beside them",
    "system": "both services as a user starts them, images, clients in other languages, processes that are killed",
    "service": "servers on loopback, ranks, builds, lowerings, commands: the processes of one service at most",
    "contract": "what the implementations of a protocol need, each in one suite",
    "device": "a device that the host need not have; not in `make test`",
    "unit": "nothing",
    "architecture": "git, and Python for a look at what is imported",
}


def ring_of(path: Path | str) -> str:
    """The ring of a test file, by its path in the repository or on the disk.

    Raises:
        ValueError: The file is in no ring.
    """
    parts = (ROOT / path).relative_to(ROOT / "tests").parts
    if parts[0] not in RINGS:
        raise ValueError(f"{path} is in none of the folders {', '.join(RINGS)} of tests/")
    return parts[0]
