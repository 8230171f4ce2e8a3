from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.hang_guard import HANG_S
from tests.processes import lives
from tests.repository import ROOT

CHILD = """
import signal, time
from execution.forkserver.parent_death import die_with_parent
die_with_parent(signal.SIGKILL)
print("ready", flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
from execution.forkserver.parent_death import parent_environment
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, env=os.environ | parent_environment()
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""

#: The leader waits for a lock that it holds itself. No signal interrupts that, so Python runs no handler.
PARENT_OF_LEADER = """
import ctypes, os, time
from execution.forkserver.parent_death import end_tree_with_parent
parent = os.getpid()
leader = os.fork()
if leader == 0:
    os.setsid()
    end_tree_with_parent(parent)
    print(os.getpid(), flush=True)
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)
time.sleep(600)
"""


@pytest.mark.parametrize("program", [PARENT, PARENT_OF_LEADER], ids=["child", "leader that Python cannot interrupt"])
def test_a_child_ends_with_its_killed_parent(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert lives(child)
        parent.kill()
        deadline = time.monotonic() + HANG_S
        while lives(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        is_left = lives(child)
        if is_left:
            child.kill()
        assert not is_left


def test_a_child_whose_parent_has_ended_ends_at_once() -> None:
    environment = os.environ | {"KILN_PARENT_PID": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=environment, capture_output=True, timeout=30, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert not child.stdout
