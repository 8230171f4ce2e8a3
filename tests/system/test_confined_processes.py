"""Every process of both services is confined, whatever started it."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from bundle.host.confinement import RANK, TEXT, Confinement
from tests.processes import descendants
from tests.servers.stack import Stack


def processes_of(stack: Stack) -> list[psutil.Process]:
    """Services, forkservers, and what these have forked: what `kiln up` started, without itself."""
    return descendants(stack.process.pid)


def test_every_process_is_confined(stack: Stack, tiny: str) -> None:
    # A plan starts the last forkserver that a stack can have.
    stack.kiln("plan", "examples/configs/tiny.yaml", "--model", "kiln-tiny")
    found = processes_of(stack)
    names = {process.name() for process in found}
    assert {"kiln-rank-0", "kiln-text", "kiln-forkserver", "kiln-plans"} <= names, names
    for process in found:
        assert "NoNewPrivs:\t1\n" in Path(f"/proc/{process.pid}/status").read_text(), process
        assert max(process.rlimit(resource.RLIMIT_CORE)) <= 1, process


@pytest.mark.parametrize(("name", "confinement"), [("kiln-rank-0", RANK), ("kiln-text", TEXT)])
def test_processes_have_the_limits_of_their_kind(stack: Stack, tiny: str, name: str, confinement: Confinement) -> None:
    process = next(process for process in processes_of(stack) if process.name() == name)
    assert process.rlimit(resource.RLIMIT_NOFILE) == (confinement.open_files,) * 2
