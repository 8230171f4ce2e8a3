"""The parent's side of one rank process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final, NamedTuple, Self, TypeVar

import msgspec

from bundle.confinement import RANK
from bundle.errors import KilnError, ResourcesShort
from execution.errors import RankDied, RankLost
from execution.failure import Failure
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import ForkserverClient
from execution.forkserver.protocol import Call as ForkCall
from execution.ranks.control import (
    PACKET_SIZE_BYTES,
    READY,
    Call,
    Launch,
    Progress,
    Request,
    decode_reply,
    encode,
)

LogSink = Callable[[int, str], None]
AnswerSink = Callable[[Any], None]
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a rank's load: `done` of `total` parts; `part` is the one just loaded."""

    rank: int
    done: int
    total: int
    part: str


class CallUnderWay(NamedTuple):
    """A call that its rank has not answered. A step makes one for each rank, so it is a tuple.

    Attributes:
        number: Rises with each call.
        call: None for the start of the process.
    """

    number: int
    call: Call | None
    on_answer: AnswerSink


class LogPipe:
    """Reads a pipe as data arrives, and passes its lines to a sink."""

    def __init__(self, pipe: IO[bytes], sink: Callable[[str], None]) -> None:
        """Takes over the reading end."""
        self._pipe = pipe
        self._fd = pipe.fileno()
        self._sink = sink
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Reads the remaining data and closes the pipe. The writer must have ended."""
        while self._read():
            pass
        if self._rest:
            self._hand_on(self._rest)
        self._loop.remove_reader(self._fd)
        self._pipe.close()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._fd)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._hand_on(line)
        return bool(chunk)

    def _hand_on(self, line: bytes) -> None:
        self._sink(line.decode(errors="replace"))


#: Seconds that a rank has to finish its step after the parent has told it to end.
CLOSE_GRACE_S: Final = 2.0

_SERVE: Final = ForkCall("execution.ranks.process:serve_parent")
_STDERR_FD: Final = 2


class RankHandle:
    """One rank process: sends calls to it, reads its log, notices its end."""

    def __init__(
        self,
        rank: int,
        process: ChildProcess,
        control: socket.socket,
        *,
        log: LogPipe | None,
        on_death: Callable[[RankHandle], None],
    ) -> None:
        """Takes over a process that has just been requested; see `spawn`."""
        self._rank = rank
        self._process = process
        self._control = control
        self._log = log
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._death: RankLost | None = None
        self._verdict: RankLost | None = None
        self._next_number = READY + 1
        self._ready: asyncio.Future[object] = self._loop.create_future()
        self._pending = {READY: CallUnderWay(READY, None, partial(_settle, self._ready))}
        self._on_progress: dict[int, Callable[[str], None]] = {}
        self._unsent: deque[bytes] = deque()
        # Reused, because the kernel would have to map and clear new memory of this size for each packet.
        self._packet = memoryview(bytearray(PACKET_SIZE_BYTES))
        self._loop.add_reader(control.fileno(), self._receive)
        process.on_end(self._end)

    @classmethod
    def spawn(
        cls,
        launch: Launch,
        forkserver: ForkserverClient,
        memory_fds: Sequence[int],
        log_sink: LogSink | None,
        on_death: Callable[[RankHandle], None],
    ) -> Self:
        """Requests a process from a forkserver.

        Args:
            memory_fds: Descriptors of the step memory and, if ranks exchange tensors through the host, of the memory
                for that.
            on_death: Called once if the process ends unless `close` ended it.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(control)
            theirs.enter_context(their_control)
            control.setblocking(False)
            launch_fd = os.memfd_create("kiln-launch")
            theirs.callback(os.close, launch_fd)
            os.write(launch_fd, msgspec.json.encode(launch))
            os.lseek(launch_fd, 0, os.SEEK_SET)
            log, stderr_fd = None, _STDERR_FD
            if log_sink is not None:
                log_fd, stderr_fd = os.pipe()
                theirs.callback(os.close, stderr_fd)
                log = LogPipe(os.fdopen(log_fd, "rb", buffering=0), partial(log_sink, launch.rank))
                ours.callback(log.close)
            process = forkserver.start(
                _SERVE,
                [their_control.fileno(), launch_fd, *memory_fds],
                name=f"kiln-rank-{launch.rank}",
                stderr_fd=stderr_fd,
                confinement=RANK,
            )
            ours.pop_all()
            return cls(launch.rank, process, control, log=log, on_death=on_death)

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self._rank

    @property
    def pid(self) -> int | None:
        """Id of the process; None until it is forked."""
        return self._process.pid

    @property
    def oldest_call(self) -> CallUnderWay | None:
        """The call that the rank must answer next; None if it has answered all."""
        return next(iter(self._pending.values()), None)

    @property
    def death(self) -> RankLost | None:
        """How the process ended; None while it lives."""
        return self._death

    async def wait_ready(self) -> None:
        """Waits until the process accepts calls.

        Raises:
            RankLost: The process ended before.
            ResourcesShort: The host had no room for the process.
        """
        try:
            await self._ready
        except RankLost:
            if self._process.shortage is not None:
                raise self._process.shortage from None
            raise

    async def wait_ended(self) -> None:
        """Waits until the process has ended and its exit code is known."""
        with contextlib.suppress(ResourcesShort):
            await self._process.wait()

    async def call(
        self, call: Call, answer_type: type[AnswerT], on_progress: Callable[[str], None] | None = None
    ) -> AnswerT:
        """Calls the rank and waits for the answer.

        Raises:
            RankLost: The process has ended.
            KilnError: The rank has failed the call.
        """
        answered: asyncio.Future[object] = self._loop.create_future()
        self.begin(call, partial(_settle, answered), on_progress)
        answer = await answered
        assert isinstance(answer, answer_type), f"{call} was answered by {answer}"
        return answer

    def begin(self, call: Call, on_answer: AnswerSink, on_progress: Callable[[str], None] | None = None) -> None:
        """Calls the rank without waiting. `on_answer` gets the answer, or the error that `call` would raise, once."""
        if self.death is not None:
            on_answer(self.death)
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._pending[number] = CallUnderWay(number, call, on_answer)
        if on_progress is not None:
            self._on_progress[number] = on_progress
        self._unsent.append(encode(Request(number, call)))
        if len(self._unsent) == 1:
            self._send()

    async def close(self) -> None:
        """Ends the process: hangs up, and kills it after a grace period."""
        self._is_closing = True
        self._hang_up()
        if self._process.pid is None:
            # The process is not ready, and would start only to end.
            self.kill()
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self.wait_ended()
        except TimeoutError:
            self.kill()
            await self.wait_ended()

    def kill(self, verdict: RankLost | None = None) -> None:
        """Kills the process. Has no effect if it has ended.

        Args:
            verdict: The error that its calls then raise; None names the signal.
        """
        self._verdict = self._verdict or verdict
        self._process.kill()

    def _send(self) -> None:
        """Sends the waiting calls, as many as the socket accepts now."""
        if self._control.fileno() < 0:
            # The process has ended. Once that is noticed, these calls get their answers too.
            self._unsent.clear()
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._control.fileno(), self._send_rest)
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()

    def _send_rest(self) -> None:
        self._send()
        if not self._unsent:
            self._loop.remove_writer(self._control.fileno())

    def _receive(self) -> None:
        try:
            size = self._control.recv_into(self._packet)
        except BlockingIOError:
            return
        except ConnectionResetError:
            size = 0
        if size == 0:
            # The rank is ending or unreachable, and unreachable is as good as ended. If it has not been forked, its
            # forkserver has ended, and that is the better explanation.
            self._forget_control()
            if self._process.pid is not None:
                self.kill()
            return
        reply = decode_reply(self._packet[:size])
        if isinstance(reply.answer, Progress):
            if (on_progress := self._on_progress.get(reply.number)) is not None:
                on_progress(reply.answer.part)
            return
        self._on_progress.pop(reply.number, None)
        answer = reply.answer.to_error() if isinstance(reply.answer, Failure) else reply.answer
        if isinstance(answer, RankLost):
            # The rank says that it cannot go on. Its end answers the call, after which no call can reach it.
            answer.rank = self._rank
            self.kill(answer)
            return
        self._pending.pop(reply.number).on_answer(answer)

    def _end(self) -> None:
        """Releases the resources of the process, which has ended."""
        process = self._process
        codes = (process.exit_code, process.forkserver_exit_code, -signal.SIGKILL)
        exit_code = next(code for code in codes if code is not None)
        self._death = self._verdict or RankDied(self._rank, exit_code)
        self._hang_up()
        if self._log is not None:
            self._log.close()
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            waiting.on_answer(self._death)
        if not self._is_closing:
            self._on_death(self)

    def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            self._forget_control()
            self._control.close()

    def _forget_control(self) -> None:
        self._unsent.clear()
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())


def _settle(answered: asyncio.Future[object], answer: object) -> None:
    if answered.done():
        # The caller has been cancelled.
        return
    if isinstance(answer, KilnError):
        answered.set_exception(answer)
        # Marks the error as retrieved, because the caller may have been cancelled.
        answered.exception()
    else:
        answered.set_result(answer)
