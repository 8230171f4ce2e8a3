"""Fixtures and settings that every test has."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fuzzing import SEED

if TYPE_CHECKING:
    from execution.forkserver.client import Forkserver

# Tests, builds and ranks share the processors, and threads that spin for each other there waste them: beside one busy
# process, tests of torch took twice the time on the clock. Read when torch is loaded, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Stores, indices and databases wait for the disk at every change, of which tests make a great many.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ["TMPDIR"] = str(_MEMORY)
    # Found anew from the environment.
    tempfile.tempdir = None

# A run that a shell started in the background ignores interrupts, and so would every child that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz seed: {SEED} (KILN_FUZZ_SEED={SEED} repeats it)"


@pytest.fixture(scope="session")
def lowerings() -> Iterator[Forkserver]:
    """The forkserver of all lowerings in tests that call no service."""
    # Tests of what is installed without the compiler begin here, too.
    from compiler_svc.lower.pool import make_forkserver  # noqa: PLC0415

    with contextlib.closing(make_forkserver()) as forkserver:
        yield forkserver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest file first, so that it does not keep one of several workers busy at the end."""
    items.sort(key=lambda item: item.path.parent.name != "parity")
