"""Long-lived children: a process that answers one call after another until the other end hangs up.

    class Adder(Worker): def _explain(self): return AdderLost(…)             parent
    total = await Adder(forkserver, Call("package.module:serve"), …).ask(Add(1, 2), Sum)
    def serve(control_fd): serve_calls(Channel(control_fd), decode_call, add)                               child

Messages are MessagePack behind their length, over a stream. A child answers in order; it may tell `Progress` before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec

from bundle.errors import KilnError, ResourcesShort
from bundle.host.confinement import Confinement
from execution.failure import Failure
from execution.forkserver.client import STDERR_FD, ForkserverClient
from execution.forkserver.protocol import Call

#: The longest answer that a parent takes: the table of a million tokens, or the ids of what memory allows.
MAX_ANSWER_BYTES: Final = 1 << 28
_LENGTH: Final = struct.Struct("<Q")
#: Most bytes that an end reads at once.
_READ_BYTES: Final = 1 << 17

AnswerT = TypeVar("AnswerT")
CallT = TypeVar("CallT")
AnswerSink = Callable[[Any], None]
ProgressSink = Callable[[str], None]

_ENCODER: Final = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)


class _NotAnAnswer(Exception):
    """A child has sent what no call asks for."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A part of the call has been done."""

    part: str


def _pack(message: object) -> bytes:
    data = _ENCODER.encode(message)
    return _LENGTH.pack(len(data)) + data


class _Inbox:
    """What has arrived over a socket."""

    def __init__(self) -> None:
        # Reused, because the kernel would have to map and clear new memory of this size for each message.
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._received = bytearray()

    def fill(self, connection: socket.socket) -> int:
        """Reads once; returns the number of bytes, which is 0 if the other end has hung up."""
        size = connection.recv_into(self._chunk)
        self._received += self._chunk[:size]
        return size

    def take(self, max_bytes: int) -> bytes | None:
        """The next message, if all of it has arrived; raises _NotAnAnswer if it is longer than `max_bytes`."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(received)
        if size > max_bytes:
            raise _NotAnAnswer
        end = _LENGTH.size + size
        if len(received) < end:
            return None
        packet = bytes(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return packet

    def clear(self) -> None:
        """Forgets what has arrived."""
        self._received.clear()


class Channel:
    """One end of a stream of messages, which blocks."""

    def __init__(self, fd: int, timeout_s: float | None = None) -> None:
        """Takes over a socket. A wait of `timeout_s` for the other end raises `TimeoutError`; None waits for ever."""
        self.timeout_s = timeout_s
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(timeout_s)
        self._inbox = _Inbox()

    def send(self, message: object) -> None:
        """Sends a message."""
        self._socket.sendall(_pack(message))

    def receive(self, decode: Callable[[bytes], AnswerT]) -> AnswerT:
        """Waits for the next message; raises EOFError if the other end has hung up."""
        while (packet := self._inbox.take(sys.maxsize)) is None:
            try:
                size = self._inbox.fill(self._socket)
            except ConnectionResetError:
                # It had not read all that this end has sent.
                size = 0
            if size == 0:
                raise EOFError("the other end has hung up")
        return decode(packet)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def serve_calls(
    channel: Channel,
    decode: Callable[[bytes], CallT],
    answer: Callable[[CallT, ProgressSink], object],
    *,
    explain: Callable[[CallT, Exception], KilnError] | None = None,
) -> None:
    """Answers calls until the parent hangs up; a named error is an answer.

    `answer` does what a call says, and may tell of its parts. `explain` names any other error, for the answer; None
    lets it end the process.
    """

    def report(part: str) -> None:
        channel.send(Progress(part))

    while True:
        try:
            call = channel.receive(decode)
        except EOFError:
            return
        result: object
        try:
            result = answer(call, report)
        except KilnError as error:
            _log.exception("%s failed", type(call).__name__)
            result = Failure.of(error)
        except Exception as error:
            if explain is None:
                raise
            _log.exception("%s failed unexpectedly", type(call).__name__)
            result = Failure.of(explain(call, error))
        channel.send(result)


class CallUnderWay(NamedTuple):
    """A call without an answer yet; `number` rises with each. It is a tuple: a step makes one for each rank."""

    number: int
    call: object
    on_answer: AnswerSink
    on_progress: ProgressSink | None = None


class Worker(ABC):
    """One long-lived child: sends calls to it, takes its answers, notices its end, after which calls get `death`."""

    #: Seconds that it has to end by itself once `close` has hung up.
    grace_s: float = 0.0

    def __init__(
        self,
        forkserver: ForkserverClient,
        call: Call,
        fds: Sequence[int] = (),
        *,
        decode: Callable[[bytes], Any],
        name: str,
        confinement: Confinement,
        stderr_fd: int = STDERR_FD,
        on_death: Callable[[Any], None] | None = None,
    ) -> None:
        """Requests the process; see `ForkserverClient.start`.

        Args:
            call: Its function, which takes the descriptor of its end of the channel and then `fds`.
            decode: Reads its answers, `Progress` and `Failure` among them if it sends such.
            on_death: Called once if the process ends unless `close` ended it.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as unused, theirs:
            unused.enter_context(self._control)
            self.process = forkserver.start(
                call, [theirs.fileno(), *fds], name=name, stderr_fd=stderr_fd, confinement=confinement
            )
            unused.pop_all()
        self.death: KilnError | None = None
        self._verdict: KilnError | None = None
        self._decode = decode
        self._on_death = on_death
        self._is_closing = self._is_killed = False
        self._num_calls = 0
        self._pending = deque[CallUnderWay]()
        self._unsent = deque[memoryview]()
        self._inbox = _Inbox()
        self._control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control.fileno(), self._receive)
        self.process.on_end(self._end)

    @abstractmethod
    def _explain(self) -> KilnError:
        """The error of a child that ended by itself; `process` says how."""

    def _find_verdict(self, answer: object) -> KilnError | None:  # noqa: ARG002 - for those that override it
        """The error of all calls if an answer says that the child cannot go on; None for any other answer."""
        return None

    @property
    def pid(self) -> int | None:
        """Id of the process; None until it is forked."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or has been killed."""
        return self._is_killed or self.process.has_ended

    @property
    def oldest_call(self) -> CallUnderWay | None:
        """The call that the child must answer next; None if it has answered all."""
        return self._pending[0] if self._pending else None

    async def ask(self, call: object, answer_type: type[AnswerT], on_progress: ProgressSink | None = None) -> AnswerT:
        """Calls the child and waits for the answer."""
        answered: asyncio.Future[object] = self._loop.create_future()
        self.begin(call, partial(settle, answered), on_progress)
        answer = await answered
        assert isinstance(answer, answer_type), f"{type(call)} was answered by {type(answer)}"
        return answer

    def begin(self, call: object, on_answer: AnswerSink, on_progress: ProgressSink | None = None) -> None:
        """Calls the child without waiting. `on_answer` gets the answer, or the error that `ask` would raise, once."""
        if self.death is not None:
            on_answer(self.death)
            return
        self._unsent.append(memoryview(_pack(call)))
        self._num_calls += 1
        self._pending.append(CallUnderWay(self._num_calls, call, on_answer, on_progress))
        if len(self._unsent) == 1:
            self._send()

    def kill(self, verdict: KilnError | None = None) -> None:
        """Kills the process, unless it has ended. Its calls then raise `verdict` or, for None, how it ended."""
        self._is_killed = True
        self._verdict = self._verdict or verdict
        self.process.kill()

    async def wait_ended(self) -> None:
        """Waits until the process has ended and its exit code is known."""
        with contextlib.suppress(ResourcesShort):
            await self.process.wait()

    async def close(self) -> None:
        """Ends the process: hangs up, and kills it after a grace period."""
        self._is_closing = True
        self._hang_up()
        if self.process.pid is None or not self.grace_s:
            # One that is not forked yet would start only to end.
            self.kill()
        try:
            async with asyncio.timeout(self.grace_s or None):
                await self.wait_ended()
        except TimeoutError:
            self.kill()
            await self.wait_ended()

    def _send(self) -> None:
        try:
            # Once the end of the process is noticed, calls behind it get their answers too.
            while self._unsent and self._control.fileno() >= 0:
                size = self._control.send(self._unsent[0])
                if size < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][size:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._control.fileno(), self._send_rest)
            return
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._unsent.clear()

    def _send_rest(self) -> None:
        self._send()
        if not self._unsent:
            self._loop.remove_writer(self._control.fileno())

    def _receive(self) -> None:
        try:
            size = self._inbox.fill(self._control)
        except BlockingIOError:
            return
        except ConnectionResetError:
            size = 0
        if size == 0:
            # The child is ending or unreachable, and unreachable is as good as ended. If it has not been forked, its
            # forkserver has ended, and that is the better explanation.
            self._forget_control()
            if self.process.pid is not None:
                self.kill()
            return
        try:
            while (packet := self._inbox.take(MAX_ANSWER_BYTES)) is not None:
                self._take(self._read(packet))
        except _NotAnAnswer:
            self._forget_control()
            self.kill()

    def _read(self, packet: bytes) -> object:
        """Decodes a message; the error, if it is a failure. A child that a stranger has taken over may send any bytes.

        Raises:
            _NotAnAnswer: The message is none that a child sends.
        """
        try:
            message = self._decode(packet)
            return message.to_error() if isinstance(message, Failure) else message
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise _NotAnAnswer from error

    def _take(self, answer: object) -> None:
        if not self._pending:
            # No call is under way.
            raise _NotAnAnswer
        if isinstance(answer, Progress):
            if (on_progress := self._pending[0].on_progress) is not None:
                on_progress(answer.part)
            return
        if (verdict := self._find_verdict(answer)) is not None:
            # The end of the process answers the call, after which no call can reach it.
            self._forget_control()
            self._inbox.clear()
            self.kill(verdict)
            return
        self._pending.popleft().on_answer(answer)

    def _end(self) -> None:
        self.death = self._verdict or self.process.shortage or self._explain()
        self._hang_up()
        pending, self._pending = self._pending, deque()
        for waiting in pending:
            waiting.on_answer(self.death)
        if self._on_death is not None and not self._is_closing:
            self._on_death(self)

    def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            self._forget_control()
            self._control.close()

    def _forget_control(self) -> None:
        self._unsent.clear()
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())


def settle(answered: asyncio.Future[Any], answer: object) -> None:
    """Gives a caller the answer or the error, unless the caller has been cancelled."""
    if answered.done():
        return
    if isinstance(answer, Exception):
        answered.set_exception(answer)
        # Marks the error as retrieved, because the caller may be cancelled before it takes it.
        answered.exception()
    else:
        answered.set_result(answer)
