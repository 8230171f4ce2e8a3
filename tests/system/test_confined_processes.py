"""Every process of both services is confined, whatever started it."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from bundle.confinement import RANK
from tests.processes import descendants, is_rank
from tests.servers.stack import Stack


def processes_of(stack: Stack) -> list[psutil.Process]:
    """Services, forkservers, and what these have forked: what `kiln up` started, without itself."""
    return descendants(stack.process.pid)


def test_every_process_is_confined(stack: Stack, tiny: str) -> None:
    # A plan starts the last forkserver that a stack can have.
    stack.kiln("plan", "examples/configs/tiny.yaml", "--model", "kiln-tiny")
    found = processes_of(stack)
    names = {process.name() for process in found}
    assert {"kiln-rank-0", "kiln-forkserver", "kiln-plans"} <= names, names
    for process in found:
        assert "NoNewPrivs:\t1\n" in Path(f"/proc/{process.pid}/status").read_text(), process
        assert max(process.rlimit(resource.RLIMIT_CORE)) <= 1, process


def test_ranks_have_the_limits_of_ranks(stack: Stack, tiny: str) -> None:
    rank = next(process for process in processes_of(stack) if is_rank(process))
    assert rank.rlimit(resource.RLIMIT_NOFILE) == (RANK.open_files,) * 2
