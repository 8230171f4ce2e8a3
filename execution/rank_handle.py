"""A parent's end of one rank process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self, TypeVar

import msgspec

from bundle.errors import KilnError
from execution.control import PACKET_SIZE_BYTES, READY, Call, Launch, Progress, Request, decode_reply, encode
from execution.errors import RankDied
from execution.failure import Failure
from execution.log_pipe import LogPipe
from execution.parent_death import parent_environment
from execution.threads import thread_environment

#: A rank that is told to end has this long to finish its step.
CLOSE_GRACE_S: Final = 2.0

LogSink = Callable[[int, str], None]
AnswerSink = Callable[[Any], None]
AnswerT = TypeVar("AnswerT")


class RankHandle:
    """One rank process: calls to it, its log, its end."""

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        log_sink: LogSink | None,
        on_death: Callable[[RankHandle], None],
    ) -> None:
        """Takes over a process that has just been started; see `spawn`."""
        self._rank = rank
        self._process = process
        self._control = control
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._next_number = READY + 1
        self._ready: asyncio.Future[object] = self._loop.create_future()
        self._pending: dict[int, AnswerSink] = {READY: partial(_settle, self._ready)}
        self._on_progress: dict[int, Callable[[str], None]] = {}
        self._unsent: deque[bytes] = deque()
        self._log = None
        if log_sink is not None:
            assert process.stderr is not None, "spawn pipes it"
            self._log = LogPipe(process.stderr, partial(log_sink, rank))
        # Not asyncio's subprocesses: their `kill` can take the exit code away from whoever waits for it.
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    def spawn(
        cls,
        launch: Launch,
        memory_fds: Sequence[int],
        log_sink: LogSink | None,
        on_death: Callable[[RankHandle], None],
    ) -> Self:
        """Starts a process.

        Args:
            memory_fds: Of the step memory and, where there are several ranks, of the collective memory.
            on_death: Called once, should the process end other than by `close`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launch_fd = os.memfd_create("kiln-launch")
        try:
            os.write(launch_fd, msgspec.json.encode(launch))
            os.lseek(launch_fd, 0, os.SEEK_SET)
            descriptors = (theirs.fileno(), launch_fd, *memory_fds)
            process = subprocess.Popen(
                [sys.executable, "-m", "execution.rank_process", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stderr=None if log_sink is None else subprocess.PIPE,
                env=_child_environment(launch.num_threads),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(launch_fd)
        ours.setblocking(False)
        return cls(launch.rank, process, ours, log_sink, on_death)

    @property
    def death(self) -> RankDied | None:
        """How the process ended, None while it lives."""
        return_code = self._process.returncode
        return None if return_code is None else RankDied(self._rank, return_code)

    async def wait_ready(self) -> None:
        """Waits until the process takes calls.

        Raises:
            RankDied: It ended before.
        """
        await self._ready

    async def wait_ended(self) -> None:
        """Waits until the process has ended and been collected."""
        await asyncio.shield(self._exited)

    async def call(
        self, call: Call, answer_type: type[AnswerT], on_progress: Callable[[str], None] | None = None
    ) -> AnswerT:
        """Calls the rank and waits for the answer.

        Raises:
            RankDied: The process has ended.
            KilnError: The rank's own failure.
        """
        answered: asyncio.Future[object] = self._loop.create_future()
        self.begin(call, partial(_settle, answered), on_progress)
        answer = await answered
        assert isinstance(answer, answer_type), f"{call} was answered by {answer}"
        return answer

    def begin(self, call: Call, on_answer: AnswerSink, on_progress: Callable[[str], None] | None = None) -> None:
        """Calls the rank without waiting; `on_answer` gets the answer or the error that `call` raises, once."""
        if self.death is not None:
            on_answer(self.death)
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._pending[number] = on_answer
        if on_progress is not None:
            self._on_progress[number] = on_progress
        self._unsent.append(encode(Request(number, call)))
        if len(self._unsent) == 1:
            self._send()

    async def close(self) -> None:
        """Ends the process: by hanging up, and after a grace period by force."""
        self._is_closing = True
        self._hang_up()
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self.wait_ended()
        except TimeoutError:
            self.kill()
            await self.wait_ended()

    def kill(self) -> None:
        """Ends the process by force; harmless where it has ended."""
        if not self._exited.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _send(self) -> None:
        """Sends what waits, as far as the socket takes it now."""
        if self._control.fileno() < 0:
            # The end of the process is about to be noticed, and answers these calls too.
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
            packet = self._control.recv(PACKET_SIZE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            # It is ending, or can no longer be talked to, which comes to the same.
            self._forget_control()
            self.kill()
            return
        reply = decode_reply(packet)
        if isinstance(reply.answer, Progress):
            if (on_progress := self._on_progress.get(reply.number)) is not None:
                on_progress(reply.answer.part)
            return
        self._on_progress.pop(reply.number, None)
        answer = reply.answer
        self._pending.pop(reply.number)(answer.to_error() if isinstance(answer, Failure) else answer)

    def _reap(self) -> None:
        """Collects the process, which has ended."""
        return_code = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._hang_up()
        if self._log is not None:
            self._log.close()
        pending, self._pending = self._pending, {}
        for on_answer in pending.values():
            on_answer(RankDied(self._rank, return_code))
        self._exited.set_result(None)
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
        # Whoever called has given up.
        return
    if isinstance(answer, KilnError):
        answered.set_exception(answer)
    else:
        answered.set_result(answer)


def _child_environment(num_threads: int) -> dict[str, str]:
    return {
        **os.environ,
        **parent_environment(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **thread_environment(num_threads),
    }
