"""What every test may take for granted."""

import signal

import pytest

from tests.fuzzing import SEED

# A run that a shell started in the background ignores interrupts, and so would every child that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz seed: {SEED} (KILN_FUZZ_SEED={SEED} repeats it)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest file first, so that it does not keep one of several workers busy at the end."""
    items.sort(key=lambda item: item.path.parent.name != "parity")
