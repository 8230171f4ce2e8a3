"""Leaves these tests to `make test-xla`, which runs them in an environment of their own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-records", action="store_true", help="record the graphs anew instead of comparing them")


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
