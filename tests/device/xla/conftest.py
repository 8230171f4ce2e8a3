"""Leaves these tests to `make test-xla`, which runs them in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from compiler_svc.lower.neuron.command import AS_NEURON

if TYPE_CHECKING:
    from tests.device.xla.records import Records

# Its assertions say what they found only so.
pytest.register_assert_rewrite("tests.device.xla.graphs")

HAS_XLA = find_spec("torch_xla") is not None
collect_ignore_glob = [] if HAS_XLA else ["test_*.py"]
if HAS_XLA:
    # Before a test imports torch-xla, which reads it.
    os.environ |= AS_NEURON


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-records", action="store_true", help="record the graphs anew instead of comparing them")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if HAS_XLA:
        from tests.device.xla.graphs import CHECKED  # noqa: PLC0415 - only that environment has what it imports

        numbers = f"{CHECKED['graphs']} graphs with {CHECKED['instructions']} instructions"
        terminalreporter.write_line(f"checked by the rules of Neuron's compiler: {numbers}")


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    """Fails a test whose graphs ran an operation on the CPU.

    torch-xla does so with what it does not lower, and counts it as `aten::…`. Neuron has no CPU beside its graphs.
    """
    import torch_xla.debug.metrics  # noqa: PLC0415 - only that environment has it

    from tests.device.xla.traces import list_fallbacks  # noqa: PLC0415

    torch_xla.debug.metrics.clear_all()
    yield
    assert list_fallbacks() == []


@pytest.fixture
def records(request: pytest.FixtureRequest) -> Records:
    """The record of graphs, which tests compare theirs with, or write."""
    from tests.device.xla.records import Records  # noqa: PLC0415

    return Records(writes=request.config.getoption("--write-records"))
