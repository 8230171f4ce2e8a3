"""Long-lived children, whatever they do: calls and answers, news, what is no answer, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bundle.errors import KilnError, ResourcesShort
from bundle.host.confinement import SERVICE
from execution.errors import RankFailed
from execution.failure import Failure, name_cause
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.forkserver.worker import MAX_ANSWER_BYTES, Channel, Progress, ProgressSink, Worker, serve_calls
from tests.hang_guard import HANG_S

HERE = "tests.service.execution.forkserver.test_worker"


class Said(msgspec.Struct, frozen=True, tag=True):
    """An answer."""

    value: Any


class Lost(KilnError, code="UNAVAILABLE"):
    message = "lost: {cause}"
    cause: str


#: An answer whose text is none in UTF-8.
NO_TEXT = msgspec.msgpack.encode(Said("xx")).replace(b"xx", b"\xff\xff")
DECODE = msgspec.msgpack.Decoder(Said | Progress | Failure).decode


def work(control_fd: int) -> None:
    """Answers calls, which are expressions."""
    names = {"os": os, "signal": signal, "time": time, "refuse": refuse}

    def answer(call: str, report: ProgressSink) -> Said:
        return Said(eval(call, names | {"report": report, "control_fd": control_fd}))

    decode = msgspec.msgpack.Decoder(str).decode
    serve_calls(Channel(control_fd), decode, answer, explain=lambda _, error: RankFailed(7, type(error).__name__))


def refuse() -> None:
    raise ResourcesShort("room", "none", 3.0)


class Evaluator(Worker):
    """What does expressions; of the answer `"enough"` it says that it cannot go on."""

    deaths = 0

    def __init__(self, forkserver: Forkserver, function: str = "work") -> None:
        def count(worker: Evaluator) -> None:
            worker.deaths += 1

        call = Call(f"{HERE}:{function}")
        super().__init__(forkserver, call, decode=DECODE, name="one", confinement=SERVICE, on_death=count)

    def _explain(self) -> KilnError:
        return Lost(name_cause(self.process.exit_code))

    def _find_verdict(self, answer: object) -> KilnError | None:
        return Lost("it has enough") if answer == Said("enough") else None

    async def evaluate(self, call: str) -> Any:
        async with asyncio.timeout(HANG_S):
            return (await self.ask(call, Said)).value


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Forkserver]:
    with contextlib.closing(Forkserver("forkserver", Call("importlib:import_module", (HERE,)))) as forkserver:
        yield forkserver


@asynccontextmanager
async def working(forkserver: Forkserver) -> AsyncIterator[Evaluator]:
    worker = Evaluator(forkserver)
    try:
        yield worker
    finally:
        await worker.close()
        assert worker.has_ended


async def test_calls_are_answered_in_order_however_long_they_are(forkserver: Forkserver) -> None:
    """Most of these bytes wait until the child has been forked, and none of them in one piece."""
    async with working(forkserver) as worker:
        long = [f"{number}, '{'x' * 300_000}' * 10" for number in range(3)]
        answers = await asyncio.gather(*map(worker.evaluate, [*long, "4"]))
        assert answers == [*([number, "x" * 3_000_000] for number in range(3)), 4]
        assert worker.oldest_call is None


async def test_parts_are_told_before_the_answer(forkserver: Forkserver) -> None:
    async with working(forkserver) as worker:
        told: list[str] = []
        answers = [worker.ask("[report(part) for part in 'abc'] and 0", Said, told.append), worker.ask("1", Said)]
        assert await asyncio.gather(*answers) == [Said(0), Said(1)]
        assert told == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("call", "kind", "message"), [("refuse()", ResourcesShort, "none"), ("1 / 0", RankFailed, "ZeroDivisionError")]
)
async def test_an_error_is_an_answer(forkserver: Forkserver, call: str, kind: type[KilnError], message: str) -> None:
    async with working(forkserver) as worker:
        with pytest.raises(kind, match=message):
            await worker.evaluate(call)
        assert await worker.evaluate("1") == 1


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), 40)", "signal 40"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)", "the process that it was forked from"),
        ("'enough'", "it has enough"),
    ],
)
async def test_the_end_answers_all_calls(forkserver: Forkserver, call: str, cause: str) -> None:
    async with working(forkserver) as worker:
        for answer in await asyncio.gather(worker.evaluate(call), worker.evaluate("1"), return_exceptions=True):
            assert str(answer) == f"lost: {cause}"
        with pytest.raises(Lost, match=cause):
            await worker.evaluate("2")
        assert worker.deaths == 1


def test_a_parent_that_hangs_up_with_unread_messages_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with Channel(theirs.detach()) as channel:
        channel.send(Progress("unread"))
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(DECODE)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<Q", MAX_ANSWER_BYTES + 1),
        struct.pack("<Q", 3) + b"\xc1\xc1\xc1",
        2 * (struct.pack("<Q", 5) + msgspec.msgpack.encode("text")),
        struct.pack("<Q", len(NO_TEXT)) + NO_TEXT,
    ],
    ids=["too-long", "no-message", "of-another-type", "no-text"],
)
async def test_what_is_no_answer_ends_the_child(forkserver: Forkserver, sent: bytes) -> None:
    async with working(forkserver) as worker:
        with pytest.raises(Lost, match="SIGKILL"):
            await worker.evaluate(f"os.write(control_fd, {sent!r}), time.sleep(600)")


async def test_an_answer_that_nobody_asked_for_ends_the_child(forkserver: Forkserver) -> None:
    async with working(forkserver) as worker:
        unasked = msgspec.msgpack.encode(Said("unasked"))
        sent = 2 * (struct.pack("<Q", len(unasked)) + unasked)
        assert await worker.evaluate(f"os.write(control_fd, {sent!r}), time.sleep(600)") == "unasked"
        with pytest.raises(Lost, match="SIGKILL"):
            await worker.evaluate("1")


@pytest.mark.parametrize(
    ("grace_s", "call", "cause"), [(HANG_S, "", "exit code 0"), (0.05, "time.sleep(9)", "SIGKILL")]
)
async def test_closing_waits_for_a_moment_and_is_no_death(
    forkserver: Forkserver, grace_s: float, call: str, cause: str
) -> None:
    worker = Evaluator(forkserver)
    worker.grace_s = grace_s
    await worker.evaluate("0")
    if call:
        worker.begin(call, lambda _: None)
    await worker.close()
    with pytest.raises(Lost, match=cause):
        await worker.evaluate("1")
    assert worker.deaths == 0


async def test_a_verdict_is_what_calls_raise(forkserver: Forkserver) -> None:
    async with working(forkserver) as worker:
        under_way = asyncio.create_task(worker.evaluate("time.sleep(600)"))
        await asyncio.sleep(0)
        for verdict in (Lost("hung"), Lost("later")):
            worker.kill(verdict)
        assert worker.has_ended
        with pytest.raises(Lost, match="hung"):
            await under_way


async def test_a_child_that_was_never_forked_says_so() -> None:
    """The forkserver of this one has a second thread, so that it forks nothing."""
    with contextlib.closing(
        Forkserver("forkserver", Call("tests.service.execution.forkserver.family:start_thread"))
    ) as unable:
        worker = Evaluator(unable)
        with pytest.raises(Lost, match="exit code 1"):
            await worker.evaluate("1")
        await worker.close()


def test_a_channel_says_that_the_other_end_hangs_or_hung_up() -> None:
    ours, theirs = socket.socketpair()
    with Channel(ours.detach(), 0.05) as channel, theirs, pytest.raises(TimeoutError):
        channel.receive(bytes)
    ours, theirs = socket.socketpair()
    with Channel(ours.detach()) as channel:
        with theirs:
            theirs.sendall(struct.pack("<Q", 5) + b"four")
        with pytest.raises(EOFError):
            channel.receive(bytes)
