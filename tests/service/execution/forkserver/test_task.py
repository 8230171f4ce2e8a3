"""One-shot children, whatever they do: order and answer, news, limits, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bundle.errors import KilnError, ResourcesShort
from bundle.host.confinement import SERVICE
from execution.errors import RankFailed
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.forkserver.task import Ending, decode, encode, run_task, serve_order
from tests.hang_guard import until
from tests.running_time import running_time
from tests.shortages import few_descriptors, keeps_descriptors

HERE = "tests.service.execution.forkserver.test_task"


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Forkserver]:
    with contextlib.closing(Forkserver("forkserver", Call("importlib:import_module", (HERE,)))) as forkserver:
        yield forkserver


def evaluate(order: bytes) -> Any:
    return eval(order)


def work(order_fd: int, answer_fd: int) -> None:
    """Does the order, an expression."""
    serve_order(order_fd, answer_fd, evaluate, explain=lambda error: RankFailed(7, type(error).__name__))


def tell(order_fd: int, answer_fd: int, news_fd: int) -> None:
    for _ in range(3):
        os.write(news_fd, b"n" * 60_000)
    work(order_fd, answer_fd)


def write_last(order_fd: int, answer_fd: int, last_fd: int) -> None:
    os.write(last_fd, b"!")
    work(order_fd, answer_fd)


def leave_half(order_fd: int, answer_fd: int) -> None:
    """Fails in the middle of a long answer: no file of this process may have more bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    work(order_fd, answer_fd)


def leave_more(order_fd: int, answer_fd: int) -> None:
    """Says of its answer that it is longer than anything could be."""
    os.write(answer_fd, struct.pack("<Q?", 2**63, False) + b"answer")


def leave_and_die(order_fd: int, answer_fd: int) -> None:
    work(order_fd, answer_fd)
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ResourcesShort("room", "none", 3.0)


async def run(forkserver: Forkserver, order: str, function: str = "work", **options: Any) -> Ending:
    call = Call(f"{HERE}:{function}")
    return await run_task(forkserver, call, order.encode(), name="one", confinement=SERVICE, **options)


async def answer_of(running: Awaitable[Ending]) -> Any:
    return decode((await running).result() or b"", Any)


async def test_an_order_is_answered(forkserver: Forkserver) -> None:
    ending = await run(forkserver, "b'x' * 5_000_000")
    assert decode(ending.result() or b"", bytes) == b"x" * 5_000_000
    assert (ending.exit_code, ending.was_cut_short) == (0, False)


@pytest.mark.parametrize("answer", [[2**70, -(2**70)], []], ids=["integers without bounds", "nothing"])
async def test_an_answer_may_be(forkserver: Forkserver, answer: list[int]) -> None:
    assert await answer_of(run(forkserver, str(answer))) == answer


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        ("refuse()", ResourcesShort, "none"),
        ("1 / 0", RankFailed, "ZeroDivisionError"),
        ("sys.exit()", RankFailed, "SystemExit"),
    ],
)
async def test_an_error_is_an_answer(forkserver: Forkserver, order: str, kind: type[KilnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        await answer_of(run(forkserver, order))


@pytest.mark.parametrize(
    ("order", "exit_code", "description"),
    [
        ("os._exit(3)", 3, "exit code 3"),
        ("os.abort()", -signal.SIGABRT, "killed by SIGABRT"),
        ("os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)", None, "with the process that it was forked from"),
    ],
)
async def test_an_end_without_an_answer(
    forkserver: Forkserver, order: str, exit_code: int | None, description: str
) -> None:
    ending = await run(forkserver, order)
    assert (ending.exit_code, ending.answer, str(ending)) == (exit_code, None, description)
    assert ending.was_cut_short == (exit_code in (None, -signal.SIGABRT))
    assert ending.result() is None


async def test_an_answer_is_whole_or_there_is_none(forkserver: Forkserver) -> None:
    half = await run(forkserver, "'x' * 5000", "leave_half")
    assert (half.exit_code, half.answer) == (1, None)
    assert (await run(forkserver, "", "leave_more")).answer is None
    ending = await run(forkserver, "7", "leave_and_die")
    assert (ending.exit_code, ending.result(), ending.was_cut_short) == (-signal.SIGKILL, encode(7), False)


async def test_news_come_before_the_end(forkserver: Forkserver) -> None:
    told = []

    async def note(news: bytes) -> None:
        told.append(len(news))

    assert await answer_of(run(forkserver, "8", "tell", on_news=note)) == 8
    assert told == [60_000] * 3


async def test_descriptors_come_last(forkserver: Forkserver) -> None:
    read_fd, write_fd = os.pipe()
    await run(forkserver, "0", "write_last", fds=[write_fd])
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        assert pipe.read() == b"!"


async def test_a_child_ends_with_its_time_or_its_caller(forkserver: Forkserver) -> None:
    started: list[ChildProcess] = []

    @asynccontextmanager
    async def note(process: ChildProcess) -> AsyncIterator[None]:
        started.append(process)
        yield

    with running_time() as taken, pytest.raises(TimeoutError):
        await run(forkserver, "time.sleep(600)", timeout_s=0.2, watching=note)
    assert taken.s < 5
    task = asyncio.create_task(run(forkserver, "time.sleep(600)", watching=note))
    await until(lambda: len(started) == 2 and started[1].pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(one.has_ended, one.exit_code) for one in started] == [(True, -signal.SIGKILL)] * 2


async def test_a_host_without_descriptors(forkserver: Forkserver) -> None:
    assert await answer_of(run(forkserver, "1")) == 1

    async def ignore(_: bytes) -> None: ...

    def fail() -> None:
        with few_descriptors(3), pytest.raises((ResourcesShort, OSError)):
            # Up to the first wait, which the start comes before.
            run(forkserver, "1", on_news=ignore).send(None)

    assert keeps_descriptors(fail)
    assert await answer_of(run(forkserver, "1")) == 1


#: What orders name.
NAMES = (sys, time)
