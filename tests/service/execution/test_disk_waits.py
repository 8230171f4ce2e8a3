"""Processes that wait for a disk do not stand still."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from execution.stall import Stall, is_stopped, waits_for_disk
from tests.hang_guard import HANG_S

#: A process that has called vfork waits for its child as for a disk: no signal wakes it.
_WAIT = "import ctypes; libc = ctypes.CDLL(None); libc.vfork() or libc.pause()"


def test_a_process_that_waits_for_a_disk_does_not_stand_still() -> None:
    process = subprocess.Popen([sys.executable, "-c", _WAIT])
    try:
        deadline_s = time.monotonic() + HANG_S
        while not waits_for_disk(process.pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        stall = Stall(1.0)
        for _ in range(3):
            stall.look("work", [process.pid])
        assert (stall.unfinished_s, stall.still_s) == (2.0, 0.0)
        assert not is_stopped(process.pid)
    finally:
        for one in [*psutil.Process(process.pid).children(), process]:
            one.kill()
        process.wait()
