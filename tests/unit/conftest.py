"""Unit tests start nothing: a test of this ring fails if it, or a fixture of it, starts a process or a server."""

from __future__ import annotations

import sys
from collections.abc import Generator

import grpc
import grpc.aio
import pytest

from tests.rings import ring_of

_STARTS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen"}
)


class StartedInUnitTest(Exception):
    """A unit test started something; the event of Python's audit that says what."""

    def __init__(self, event: str) -> None:
        super().__init__(f"{event}: unit tests start nothing; tests/rings.py says where tests go that do")
        self.event = event


class _Guard:
    """Python never takes an audit hook back, so this one watches while a unit test runs."""

    is_on = False

    def watch(self, event: str, _: object) -> None:
        if self.is_on and event in _STARTS:
            raise StartedInUnitTest(event)


_guard = _Guard()
sys.addaudithook(_guard.watch)


def _refuse_server(*_: object, **__: object) -> None:
    raise StartedInUnitTest("grpc.server")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watches a test of this ring, and the fixtures that it is the first or last to use."""
    # pytest calls this hook for every test of a run.
    if ring_of(item.path) != "unit":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        # Python's audit does not see the sockets of gRPC's core.
        patch.setattr(grpc, "server", _refuse_server)
        patch.setattr(grpc.aio, "server", _refuse_server)
        _guard.is_on = True
        try:
            return (yield)
        finally:
            _guard.is_on = False
