"""No process starts through the event loop of services: on uvloop some crash before their program begins."""

import re

import pytest

from tests.repository import ROOT

CALL = re.compile(r"\.(create_)?subprocess_(exec|shell)\(")
#: Services, and the tests that run on their loop.
FOLDERS = (
    "edge",
    "execution",
    "compiler_svc",
    "runtime_svc",
    "tests/service/edge",
    "tests/service/execution",
    "tests/service/runtime_svc",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_processes_start_otherwise(folder: str) -> None:
    paths = list((ROOT / folder).rglob("*.py"))
    assert paths
    assert [str(path) for path in paths if CALL.search(path.read_text())] == []
