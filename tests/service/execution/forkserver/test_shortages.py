"""Starts that lack descriptors: a named error, nothing left open, and a forkserver that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator

import pytest

from bundle.errors import ResourcesShort
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from tests.shortages import few_descriptors, limited, open_descriptors

NOTHING = Call("os:getpid")
FOREVER = Call("time:sleep", (60,))


@pytest.fixture
def forkserver() -> Iterator[Forkserver]:
    with contextlib.closing(Forkserver("forkserver", NOTHING)) as forkserver:
        yield forkserver


async def exit_code_of(forkserver: Forkserver) -> int | None:
    return await forkserver.start(NOTHING, name="one").wait()


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
async def test_a_forkserver_that_cannot_be_started(forkserver: Forkserver, spare: int) -> None:
    before = open_descriptors()
    with few_descriptors(spare), pytest.raises(ResourcesShort, match="descriptors of this process"):
        forkserver.start(NOTHING, name="one")
    assert open_descriptors() == before
    assert await exit_code_of(forkserver) == 0


async def test_a_process_that_cannot_be_requested(forkserver: Forkserver) -> None:
    assert await exit_code_of(forkserver) == 0
    before = open_descriptors()
    with few_descriptors(1), pytest.raises(ResourcesShort, match="descriptors of this process"):
        forkserver.start(NOTHING, name="one")
    assert open_descriptors() == before
    assert await exit_code_of(forkserver) == 0


async def test_a_process_whose_descriptor_does_not_arrive(forkserver: Forkserver) -> None:
    assert await exit_code_of(forkserver) == 0
    process = forkserver.start(FOREVER, name="one")
    with few_descriptors():
        while process.pid is None:  # noqa: ASYNC110
            # Not asleep: the loop reads the report as soon as it comes.
            await asyncio.sleep(0)
    process.kill()
    assert await process.wait() == -9


@pytest.mark.parametrize("limit", [15, 16])
async def test_a_full_forkserver_refuses_a_process_and_goes_on_with_the_others(
    forkserver: Forkserver, limit: int
) -> None:
    assert await exit_code_of(forkserver) == 0
    pid = forkserver._find_pid()
    assert pid is not None
    processes: list[ChildProcess] = []
    with limited(resource.RLIMIT_NOFILE, limit, pid):
        for _ in range(limit):
            processes.append(forkserver.start(FOREVER, name="one"))
            while processes[-1].pid is None and not processes[-1].has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if processes[-1].has_ended:
                break
        *running, refused = processes
        assert refused.shortage is not None
        assert len(running) > 2
        assert not any(one.has_ended for one in running)
        await running.pop().end()
        assert await exit_code_of(forkserver) == 0
    assert forkserver._find_pid() == pid
    await asyncio.gather(*(one.end() for one in running))


@pytest.mark.parametrize("spare", [1, 2])
async def test_a_process_that_the_forkserver_cannot_fork(forkserver: Forkserver, spare: int) -> None:
    other = forkserver.start(FOREVER, name="other")
    assert await exit_code_of(forkserver) == 0
    pid = forkserver._find_pid()
    assert pid is not None
    # It reports the end of a process before it closes what it had of it.
    await asyncio.sleep(0.1)
    # Room for a part of what the request brings, or for all of it: the reports and the standard error.
    with few_descriptors(spare, pid):
        refused = forkserver.start(NOTHING, name="one")
        with pytest.raises(ResourcesShort, match="descriptors of this process"):
            await refused.wait()
        assert refused.pid is None
    assert await exit_code_of(forkserver) == 0
    assert forkserver._find_pid() == pid, "it lives on"
    assert not other.has_ended
    await other.end()
