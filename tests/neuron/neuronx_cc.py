"""Programs that the double of Neuron's packages runs in neuronx-cc's place, as Python's sources."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

#: The variable that names the file which tells the double what to do.
ORDERS: Final = "NEURON_TEST_NEURONX_CC"
#: More than any limit allows, so that it ends by itself.
TAKE_MEMORY: Final = "bytearray(1 << 45)"


def write_waiting_program(announcements: Path, *, leads_session: bool = False) -> str:
    """Makes a program that writes half a NEFF, announces itself in a folder, and waits for ever.

    Args:
        leads_session: Whether it starts a session of its own first, which the signals to its parents' do not reach.
    """
    return f"""
import os, pathlib, signal
if {leads_session}:
    os.setsid()
pathlib.Path("graph.neff").write_bytes(b"half of it")
folder = pathlib.Path({str(announcements)!r})
folder.mkdir(exist_ok=True)
(folder / str(os.getpid())).touch()
signal.pause()
"""


def find_waiting(announcements: Path) -> list[psutil.Process]:
    """Finds the processes that have announced themselves in a folder."""
    return [psutil.Process(int(one.name)) for one in announcements.glob("*")]
