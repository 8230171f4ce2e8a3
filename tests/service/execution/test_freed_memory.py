"""Ranks keep the memory that a step has freed, for the next step."""

from __future__ import annotations

import subprocess
import sys

STEPS = """
import resource
import torch
from execution.ranks.process import keep_freed_memory

def run_step():
    # What AOTInductor's code allocates and frees: more than malloc maps by itself, and less.
    torch.empty(12 << 20).fill_(1)
    torch.empty(2 << 20).fill_(1)

keep_freed_memory()
# Aligned blocks fit into what was freed only once it is a little larger: the first steps may take more.
for _ in range(12):
    run_step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    run_step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_steps_get_no_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000, "five steps' buffers are 71680 pages"
