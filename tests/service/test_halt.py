"""A process stands still before what is ordered, with all of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.servers.halt import SITE, VARIABLE, Halt

NUM_THREADS = 16
#: Threads that rename a file each, all at once.
RENAMES = """
import os, sys, threading
barrier = threading.Barrier(int(sys.argv[1]))
def rename(number):
    barrier.wait()
    os.rename(f"old{number}", f"new{number}")
threads = [threading.Thread(target=rename, args=(number,)) for number in range(barrier.parties)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_no_thread_does_what_another_one_stands_still_before(tmp_path: Path) -> None:
    for number in range(NUM_THREADS):
        (tmp_path / f"old{number}").touch()
    halt = Halt(tmp_path / "halt")
    halt.order("rename new")
    environment = os.environ | {VARIABLE: str(halt.folder), "PYTHONPATH": str(SITE)}
    command = [sys.executable, "-c", RENAMES, str(NUM_THREADS)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert list(tmp_path.glob("new*")) == []
        finally:
            halt.withdraw()
        assert process.wait() == 0
    assert len(list(tmp_path.glob("new*"))) == NUM_THREADS
