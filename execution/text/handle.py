"""The parent's side of one text process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bundle.confinement import TEXT
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call as ForkCall
from execution.stall import Watch, read_cpu_s
from execution.text.control import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    Call,
    Load,
    Loaded,
    OutOfMemory,
    Refused,
    Unreadable,
    Work,
    decode_answer,
    encode,
)
from execution.text.errors import TextInvalid, TextLimitExceeded, TextProcessLost, TextRefused

#: Named, not imported: the module loads jinja2 and tokenizers.
_PROCESS: Final = "execution.text.process"
_LOADING: Final = "reading the tokenizer and the chat template"
#: Looks at the processor time of one call, until its limit.
_LOOKS: Final = 20
#: How much longer than its processor time a call may take on the clock: other processes may have the processors.
CLOCK_FACTOR: Final = 6.0

AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """What a text process may take.

    Attributes:
        timeout_s: Processor time of one call. A million characters take half a second.
        load_timeout_s: Processor time of a load, which the largest vocabularies need two seconds of.
        max_memory_bytes: Data memory. A million characters take 150 MB, and so does the largest vocabulary.
    """

    timeout_s: float = 10.0
    load_timeout_s: float = 30.0
    max_memory_bytes: int = 2 << 30


def make_forkserver() -> Forkserver:
    """Describes the forkserver of text processes, which loads what they need when the first one is requested."""
    return Forkserver("kiln-texts", ForkCall(f"{_PROCESS}:preload"), kind="text")


class _Answers(asyncio.Protocol):
    """Receives answers, one at a time. Several tasks for each call would take longer than most calls."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._size: int | None = None
        #: Gets the packet of the next answer, or an error if there will be none.
        self.next: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._size is None and len(self._received) >= LENGTH.size:
            (self._size,) = LENGTH.unpack_from(self._received)
            if self._size > MAX_ANSWER_BYTES:
                self._settle(ConnectionAbortedError("the answer is too long"))
        if self._size is not None and len(self._received) >= LENGTH.size + self._size:
            packet = bytes(memoryview(self._received)[LENGTH.size :])
            self._received, self._size = bytearray(), None
            self._settle(packet)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self._settle(ConnectionResetError("the process has hung up"))

    def _settle(self, result: bytes | Exception) -> None:
        if self.next is None or self.next.done():
            return
        if isinstance(result, Exception):
            self.next.set_exception(result)
        else:
            self.next.set_result(result)


class TextProcess:
    """A text process that has loaded a tokenizer; construct with `start`. It does one call at a time."""

    def __init__(
        self,
        process: ChildProcess,
        transport: asyncio.Transport,
        answers: _Answers,
        limits: TextLimits,
    ) -> None:
        """Takes over a process that has just been requested; see `start`."""
        self._process = process
        self._transport = transport
        self._answers = answers
        self._limits = limits
        #: What the load told.
        self.loaded = Loaded(max_token_bytes=0, table=None, texts=[])

    @classmethod
    async def start(cls, load: Load, forkserver: ForkserverClient, limits: TextLimits) -> TextProcess:
        """Starts a process and loads a tokenizer and a template in it.

        Raises:
            TextInvalid: They cannot be read.
            TextLimitExceeded, TextProcessLost: See `call`.
        """
        control, process = cls._request(forkserver, limits)
        loop = asyncio.get_running_loop()
        transport, answers = await loop.create_unix_connection(_Answers, sock=control)
        text = cls(process, transport, answers, limits)
        try:
            await text._load(load)
        except BaseException:
            await text.close()
            raise
        return text

    @property
    def pid(self) -> int | None:
        """Id of the process; None until it is forked."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or has been killed."""
        return self._process.has_ended or self._transport.is_closing()

    async def call(self, call: Work, answer_type: type[AnswerT], work: str) -> AnswerT:
        """Calls the process and waits for the answer. If the caller is cancelled meanwhile, the process ends.

        Args:
            call: What to do.
            answer_type: The kind of answer that it has.
            work: What errors say that the process was doing.

        Raises:
            TextRefused: The template or the tokenizer refuses the prompt.
            TextLimitExceeded: The call has reached a limit. The process has ended.
            TextProcessLost: The process has ended by itself, or stood still.
        """
        answer = await self._exchange(call, work, self._limits.timeout_s)
        if isinstance(answer, Refused):
            raise TextRefused(answer.detail, is_unbounded=answer.is_unbounded)
        assert isinstance(answer, answer_type), f"{type(call)} was answered by {type(answer)}"
        return answer

    def kill(self) -> None:
        """Kills the process. Has no effect if it has ended."""
        self._transport.abort()
        self._process.kill()

    async def close(self) -> None:
        """Kills the process, which has nothing to save, and waits until it has ended."""
        self.kill()
        await self._process.wait()

    @staticmethod
    def _request(forkserver: ForkserverClient, limits: TextLimits) -> tuple[socket.socket, ChildProcess]:
        """Requests a process; returns our end of the socket of calls, and the process."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        call = ForkCall(f"{_PROCESS}:serve_parent", (limits.max_memory_bytes,))
        # Panics of the tokenizer's library quote prompts, which no log may hold.
        with theirs, Path(os.devnull).open("wb") as nowhere:
            process = forkserver.start(
                call, [theirs.fileno()], name="kiln-text", stderr_fd=nowhere.fileno(), confinement=TEXT
            )
        return control, process

    async def _load(self, load: Load) -> None:
        answer = await self._exchange(load, _LOADING, self._limits.load_timeout_s)
        if isinstance(answer, Unreadable):
            raise TextInvalid(answer.subject, answer.detail)
        assert isinstance(answer, Loaded), f"a load was answered by {type(answer)}"
        self.loaded = answer

    async def _exchange(self, call: Call, work: str, timeout_s: float) -> Answer:
        if self._transport.is_closing():
            await self.close()
            raise self._explain_end(work)
        next_answer = self._answers.next = asyncio.get_running_loop().create_future()
        packet = encode(call)
        self._transport.write(LENGTH.pack(len(packet)) + packet)
        watch = Watch(timeout_s / _LOOKS, self._make_look(next_answer, work, timeout_s))
        try:
            answer = decode_answer(await next_answer)
        # The process has ended, or what it sends is no answer.
        except (ConnectionError, msgspec.MsgspecError):
            await self.close()
            raise self._explain_end(work) from None
        except BaseException:
            self.kill()
            raise
        finally:
            watch.stop()
        if isinstance(answer, OutOfMemory):
            # What is left of its memory may not do for the next call.
            self.kill()
            raise self._memory_exceeded(work)
        return answer

    def _make_look(self, next_answer: asyncio.Future[bytes], work: str, timeout_s: float) -> Callable[[], None]:
        """Returns what looks whether a call that begins now has reached a limit of time, and then ends it."""
        loop = asyncio.get_running_loop()
        begun_s, begun_cpu_s = loop.time(), self._read_cpu_s()

        def look() -> None:
            error: TextLimitExceeded | TextProcessLost
            if self._read_cpu_s() - begun_cpu_s > timeout_s:
                error = TextLimitExceeded(work, f"{timeout_s:g} s of processor time")
            elif loop.time() - begun_s > CLOCK_FACTOR * timeout_s:
                # The prompt is not to blame: the process was stopped, or got no processor.
                error = TextProcessLost(work, f"no answer for {CLOCK_FACTOR * timeout_s:g} s")
            else:
                return
            if not next_answer.done():
                next_answer.set_exception(error)

        return look

    def _read_cpu_s(self) -> float:
        return 0.0 if self._process.pid is None else read_cpu_s(self._process.pid)

    def _explain_end(self, work: str) -> TextLimitExceeded | TextProcessLost:
        exit_code = self._process.exit_code
        if exit_code is None:
            return TextProcessLost(work, "its forkserver ended")
        # How the tokenizer's library ends a process that gets no memory.
        if exit_code == -signal.SIGABRT:
            return self._memory_exceeded(work)
        how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        return TextProcessLost(work, how)

    def _memory_exceeded(self, work: str) -> TextLimitExceeded:
        return TextLimitExceeded(work, f"{self._limits.max_memory_bytes >> 20} MiB of memory")
