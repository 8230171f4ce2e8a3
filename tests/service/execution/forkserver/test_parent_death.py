from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.hang_guard import HANG_S
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


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_child_ends_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        deadline = time.monotonic() + HANG_S
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(child)


def test_a_child_whose_parent_has_ended_ends_at_once() -> None:
    environment = os.environ | {"KILN_PARENT_PID": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=environment, capture_output=True, timeout=30, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert not child.stdout
