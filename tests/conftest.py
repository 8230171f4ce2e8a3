"""Fixtures and settings that every test has."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.fuzzing import SEED
from tests.rings import RINGS, list_times, ring_of
from tests.turns.quarantine import read_rows

if TYPE_CHECKING:
    from execution.forkserver.client import Forkserver
    from execution.ranks.forkservers import RankForkservers
    from tests.servers.stack import Stack

# Tests, builds and ranks share the processors, and threads that spin for each other there waste them: beside one busy
# process, tests of torch took twice the time on the clock. Read when torch is loaded, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `kiln_client` sets it, which a worker may import after grpc: gRPC would write to the output of commands under test.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Tests that compute with more threads share the processors with other tests: threads that wait must not keep them.
os.environ.setdefault("GOMP_SPINCOUNT", "300")

# To render a traceback with the values of all variables takes half a second of a processor.
_PLAIN = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _PLAIN])

# Stores, indices and databases wait for the disk at every change, of which tests make a great many.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ["TMPDIR"] = str(_MEMORY)
    # Found anew from the environment.
    tempfile.tempdir = None

# Workers of this run draw what the head of the run says.
os.environ.setdefault("KILN_FUZZ_SEED", str(SEED))

_QUARANTINED = frozenset(row.test for row in read_rows())

# A run that a shell started in the background ignores interrupts, and so would every child that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz seed: {SEED} (KILN_FUZZ_SEED={SEED} repeats it)"


@pytest.fixture(scope="session")
def run_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the run: one for all workers, which keep there what each of them needs."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory for a compiler's state, with one checkpoint, `tiny`."""
    # Tests that know no tensors begin here, too.
    from tests.checkpoints.random_weights import write_checkpoint  # noqa: PLC0415

    write_checkpoint(tmp_path / "models" / "tiny")
    return tmp_path


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory, run_directory: Path) -> Iterator[Stack]:
    """One pair of services for each worker of a run, with doubles of Neuron's packages. All of them share bundles.

    Tests take `stack`.
    """
    # Tests that call no service begin here, too.
    from tests.neuron.standin import make_interpreter  # noqa: PLC0415
    from tests.servers.shared_bundles import SharedBundles  # noqa: PLC0415
    from tests.servers.stack import Stack  # noqa: PLC0415

    neuron = ("--neuron-python", str(make_interpreter(tmp_path_factory.mktemp("neuron"))))
    services = Stack.start(tmp_path_factory.mktemp("kiln"), *neuron, shared=SharedBundles(run_directory / "bundles"))
    yield services
    assert services.stop() == 0


@pytest.fixture(scope="module")
def stack(services: Stack) -> Iterator[Stack]:
    """The worker's services, on which a file may leave nothing that the next one would miss or meet."""
    yield services
    assert services.take_left() == []


@pytest.fixture(scope="session")
def lowerings() -> Iterator[Forkserver]:
    """The forkserver of all lowerings in tests that call no service."""
    # Tests of what is installed without the compiler begin here, too.
    from compiler_svc.lower.pool import make_forkserver  # noqa: PLC0415

    with contextlib.closing(make_forkserver()) as forkserver:
        yield forkserver


@pytest.fixture(scope="session")
def forkservers() -> Iterator[RankForkservers]:
    """The forkservers of ranks that tests start themselves. As in a runtime, torch is loaded once for all of them."""
    # Tests that know no tensors begin here, too.
    from execution.ranks.forkservers import RankForkservers  # noqa: PLC0415

    with RankForkservers() as forkservers:
        yield forkservers


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported and tests are made, all of which stay: half the time of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is in quarantine counts as slow."""
    if item.nodeid in _QUARANTINED:
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the rings whose files take longest."""
    order = list(RINGS)
    items.sort(key=lambda item: order.index(ring_of(item.path)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how long each ring took, on all workers together, and may take."""
    reports = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    seconds = Counter[str]()
    tests = Counter[str]()
    for report in reports:
        ring = ring_of(report.nodeid.partition("::")[0])
        seconds[ring] += report.duration
        tests[ring] += report.when == "call"
    terminalreporter.section("rings")
    for line in list_times(seconds, tests):
        terminalreporter.line(line)
