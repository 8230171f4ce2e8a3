"""A one-shot child: a forked process that gets an order, may tell news meanwhile, leaves an answer, and ends.

    ending = await run_task(forkserver, Call("package.module:run"), order, name="kiln-plan", confinement=PLAN)   parent
    def run(order_fd, answer_fd): serve_order(order_fd, answer_fd, do, explain=…)                                 child

Order and answer are files without a name, which end with the last process that holds them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from bundle.errors import KilnError
from bundle.host.confinement import Confinement
from bundle.host.path_texts import read_path, write_path
from execution.failure import Failure, name_cause
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import STDERR_FD, ForkserverClient
from execution.forkserver.protocol import Call

#: No news of a child is longer.
_MAX_NEWS_BYTES: Final = 1 << 16
#: Length of an answer and whether it is an error: what has another length was cut off, and is no answer.
_HEADER: Final = struct.Struct("<Q?")

AnswerT = TypeVar("AnswerT")

#: Surrounds the wait for a child's end.
Watching = Callable[[ChildProcess], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended.

    `exit_code` is negative for the signal that ended it; None if it ended with its forkserver. `answer` is what it
    left, a `Failure` if `is_failure`; None if it ended before.
    """

    exit_code: int | None
    answer: bytes | None = None
    is_failure: bool = False

    @property
    def was_cut_short(self) -> bool:
        """Whether a signal, or the end of its forkserver, ended it before it had an answer."""
        return self.answer is None and (self.exit_code is None or self.exit_code < 0)

    @property
    def failure(self) -> KilnError | None:
        """The named error that the child raised."""
        return decode(self.answer, Failure).to_error() if self.answer is not None and self.is_failure else None

    def result(self) -> bytes | None:
        """What the child returned; None if it ended before."""
        if (failure := self.failure) is not None:
            raise failure
        return self.answer

    def __str__(self) -> str:
        cause = name_cause(self.exit_code)
        if self.exit_code is None:
            return f"with {cause}"
        return f"killed by {cause}" if self.exit_code < 0 else cause


def encode(record: object) -> bytes:
    """Writes an order or an answer as JSON, whose integers have no bounds, as in a checkpoint's `config.json`."""
    return msgspec.json.encode(record, enc_hook=write_path)


def decode(packet: bytes, kind: type[AnswerT]) -> AnswerT:
    """Reads what `encode` has written."""
    return msgspec.json.decode(packet, type=kind, dec_hook=read_path)


async def run_task(
    forkserver: ForkserverClient,
    call: Call,
    order: bytes,
    fds: Sequence[int] = (),
    *,
    name: str,
    confinement: Confinement,
    stderr_fd: int = STDERR_FD,
    timeout_s: float | None = None,
    watching: Watching = nullcontext,
    on_news: Callable[[bytes], Awaitable[None]] | None = None,
) -> Ending:
    """Runs a child to its end. Whatever ends this call ends the child, with all that it has started.

    Args:
        call: The function that the child calls. After the call's arguments it takes the descriptors of the order, of
            the answer, of a socket if there is `on_news`, and then `fds`.
        timeout_s: Seconds from the request to the end, loading of the forkserver included; then it raises TimeoutError.
        watching: Looks after the child from its request to its end; may raise then.
        on_news: Gets each packet that the child sends.

    Raises:
        ResourcesShort, OSError: The host has no room for the child.
    """
    with ExitStack() as stack:
        order_file, answer_file = (stack.enter_context(_open_nameless(one)) for one in ("kiln-order", "kiln-answer"))
        order_file.write(order)
        order_file.seek(0)
        passed = [order_file.fileno(), answer_file.fileno(), *fds]
        news = None
        with ExitStack() as theirs:
            if on_news is not None:
                news, their_news = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(news)
                theirs.enter_context(their_news)
                passed.insert(2, their_news.fileno())
            process = forkserver.start(call, passed, name=name, stderr_fd=stderr_fd, confinement=confinement)
        try:
            async with asyncio.timeout(timeout_s), watching(process):
                if news is not None and on_news is not None:
                    await _pass_on(news, on_news)
                exit_code = await process.wait()
        finally:
            await asyncio.shield(process.end())
        return Ending(exit_code, *_read_answer(answer_file))


async def _pass_on(news: socket.socket, on_news: Callable[[bytes], Awaitable[None]]) -> None:
    news.setblocking(False)
    loop = asyncio.get_running_loop()
    while packet := await loop.sock_recv(news, _MAX_NEWS_BYTES):
        await on_news(packet)


def _open_nameless(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _read_answer(file: BinaryIO) -> tuple[bytes | None, bool]:
    num_bytes = os.fstat(file.fileno()).st_size - _HEADER.size
    if num_bytes <= 0:
        return None, False
    file.seek(0)
    size, is_failure = _HEADER.unpack(file.read(_HEADER.size))
    return file.read() if size == num_bytes else None, is_failure


def serve_order(
    order_fd: int,
    answer_fd: int,
    do: Callable[[bytes], Any],
    *,
    write: Callable[[Any], bytes] = encode,
    explain: Callable[[BaseException], KilnError] | None = None,
) -> None:
    """Does the order of this process, and leaves the answer: what `do` returns, or the named error that it raises.

    `explain` names any other error, for the answer, also one that would end the process in silence; None lets it.
    """
    with os.fdopen(order_fd, "rb") as order_file:
        order = order_file.read()
    failure: KilnError | None = None
    try:
        answer = write(do(order))
    except KilnError as error:
        failure = error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if explain is None:
            raise
        failure = explain(error)
    if failure is not None:
        answer = encode(Failure.of(failure))
    with os.fdopen(answer_fd, "wb") as answer_file:
        answer_file.write(_HEADER.pack(len(answer), failure is not None))
        answer_file.write(answer)
