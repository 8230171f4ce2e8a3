"""Starts that lack descriptors: a named error, nothing left open, and a forkserver that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from bundle.errors import ResourcesShort
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call, encode
from tests.hang_guard import until
from tests.repository import ROOT
from tests.shortages import few_descriptors, keeps_descriptors, limited

NOTHING = Call("os:getpid")
FOREVER = Call("time:sleep", (600,))


@pytest.fixture
def forkserver() -> Iterator[Forkserver]:
    with contextlib.closing(Forkserver("forkserver", NOTHING)) as forkserver:
        yield forkserver


async def exit_code_of(forkserver: Forkserver) -> int | None:
    return await forkserver.start(NOTHING, name="one").wait()


async def settle(forkserver: Forkserver) -> int:
    """The id of a forkserver with one process, once it sleeps; it reports an end before it closes what it had of it."""
    pid = forkserver._find_pid()
    assert pid is not None
    await until(lambda: num_pidfds(pid) == 1 and psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
    return pid


def num_pidfds(pid: int) -> int:
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += "pidfd" in str(path.readlink())
    return found


def start_short_of_descriptors(forkserver: Forkserver, spare: int) -> None:
    with few_descriptors(spare), pytest.raises(ResourcesShort, match="descriptors of this process"):
        forkserver.start(NOTHING, name="one")


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
async def test_a_forkserver_that_cannot_be_started(forkserver: Forkserver, spare: int) -> None:
    assert keeps_descriptors(partial(start_short_of_descriptors, forkserver, spare))
    assert await exit_code_of(forkserver) == 0


async def test_a_process_that_cannot_be_requested(forkserver: Forkserver) -> None:
    assert await exit_code_of(forkserver) == 0
    assert keeps_descriptors(partial(start_short_of_descriptors, forkserver, 1))
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


@pytest.mark.parametrize(("spare", "is_read"), [(1, True), (2, True), (2, False)])
async def test_a_process_that_the_forkserver_cannot_fork(forkserver: Forkserver, spare: int, is_read: bool) -> None:
    """There is room for a part of what the request brings, or for all of it: the reports and the standard error."""
    other = forkserver.start(FOREVER, name="other")
    assert await exit_code_of(forkserver) == 0
    pid = await settle(forkserver)
    reader, writer = os.pipe()
    if not is_read:
        os.close(reader)
    with few_descriptors(spare, pid):
        refused = forkserver.start(NOTHING, name="one", stderr_fd=writer)
        os.close(writer)
        with pytest.raises(ResourcesShort, match="descriptors of this process"):
            await refused.wait()
        assert refused.pid is None
    if is_read:
        os.close(reader)
    assert await exit_code_of(forkserver) == 0
    assert forkserver._find_pid() == pid, "it lives on"
    assert not other.has_ended
    await other.end()


#: Serves as a forkserver of a user who is not root, for root has no limit of processes. Imports before it changes, so
#: that the user need not be able to read anything. Two signals lower its limit and raise it again.
AS_A_USER = """
import ctypes, os, resource, signal, sys
from execution.forkserver.server import serve
if os.geteuid() == 0:
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: otherwise its files in /proc stay root's.
limits = resource.getrlimit(resource.RLIMIT_NPROC)
lowered = (1, limits[1])
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, lowered))
signal.signal(signal.SIGUSR2, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, limits))
serve(sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture
def users_forkserver() -> Iterator[tuple[ForkserverClient, subprocess.Popen[bytes]]]:
    """The client of that forkserver, and its process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", AS_A_USER, encode(NOTHING).decode(), str(theirs.fileno())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as server:
        theirs.close()
        with ours:
            yield ForkserverClient(ours), server


async def test_a_fork_beyond_the_processes_of_a_user(
    users_forkserver: tuple[ForkserverClient, subprocess.Popen[bytes]],
) -> None:
    client, server = users_forkserver
    assert await client.start(NOTHING, name="one").wait() == 0
    server.send_signal(signal.SIGUSR1)
    with pytest.raises(ResourcesShort, match="short of processes and threads"):
        await client.start(NOTHING, name="one").wait()
    server.send_signal(signal.SIGUSR2)
    assert await client.start(NOTHING, name="one").wait() == 0
