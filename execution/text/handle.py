"""The parent's side of one text process, and the limits of time of work on what strangers have written."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bundle.errors import KilnError
from bundle.host.confinement import TEXT
from execution.failure import name_cause
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.worker import Worker, settle
from execution.stall import Watch, read_cpu_s
from execution.text.control import Answer, Load, Loaded, OutOfMemory, Refused, Unreadable, Work, decode_answer
from execution.text.errors import TextInvalid, TextLimitExceeded, TextProcessLost, TextRefused

#: Named, not imported: the module loads jinja2 and tokenizers.
_PROCESS: Final = "execution.text.process"
_LOADING: Final = "reading the tokenizer and the chat template"
#: Looks at the processor time of one piece of work, until its limit.
_LOOKS: Final = 20
#: How much longer than its processor time work may take on the clock: other processes may have the processors.
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


@contextmanager
def limiting_time(
    process: ChildProcess,
    work: str,
    timeout_s: float,
    on_limit: Callable[[KilnError], None],
    *,
    since_fork: bool = False,
) -> Iterator[None]:
    """Calls `on_limit` at each look after the work of the block has reached a limit of time.

    The limit is `timeout_s` of processor time; errors say that the process was doing `work`. With `since_fork`, the
    clock waits until the forkserver, which may load first, has forked the process.
    """
    loop = asyncio.get_running_loop()
    begun_s, begun_cpu_s = loop.time(), _read_cpu_s(process)

    def look() -> None:
        nonlocal begun_s
        if since_fork and process.pid is None:
            begun_s = loop.time()
        elif _read_cpu_s(process) - begun_cpu_s > timeout_s:
            on_limit(TextLimitExceeded(work, f"{timeout_s:g} s of processor time"))
        elif loop.time() - begun_s > CLOCK_FACTOR * timeout_s:
            # What strangers have written is not to blame: the process was stopped, or got no processor.
            on_limit(TextProcessLost(work, f"no answer for {CLOCK_FACTOR * timeout_s:g} s"))

    watch = Watch(timeout_s / _LOOKS, look)
    try:
        yield
    finally:
        watch.stop()


def _read_cpu_s(process: ChildProcess) -> float:
    return 0.0 if process.pid is None else read_cpu_s(process.pid)


def make_forkserver() -> Forkserver:
    """Describes the forkserver of text processes, which loads what they need when the first one is requested."""
    return Forkserver("kiln-texts", Call(f"{_PROCESS}:preload"), kind="text")


class TextProcess(Worker):
    """A text process that has loaded a tokenizer; construct with `start`. It does one call at a time."""

    def __init__(self, forkserver: ForkserverClient, limits: TextLimits) -> None:
        self._limits = limits
        self._work = _LOADING
        #: What the load told.
        self.loaded = Loaded(max_token_bytes=0, table=None, texts=[])
        # Panics of the tokenizer's library quote prompts, which no log may hold.
        with Path(os.devnull).open("wb") as nowhere:
            super().__init__(
                forkserver,
                Call(f"{_PROCESS}:serve_parent", (limits.max_memory_bytes,)),
                decode=decode_answer,
                name="kiln-text",
                confinement=TEXT,
                stderr_fd=nowhere.fileno(),
            )

    @classmethod
    async def start(cls, load: Load, forkserver: ForkserverClient, limits: TextLimits) -> TextProcess:
        """Starts a process and loads a tokenizer and a template in it."""
        text = cls(forkserver, limits)
        try:
            await text._load(load)
        except BaseException:
            await text.close()
            raise
        return text

    async def call(self, call: Work, answer_type: type[AnswerT], work: str) -> AnswerT:
        """Waits for the answer to a call; errors name its `work`. If the caller is cancelled, the process ends."""
        answer = await self._exchange(call, work, self._limits.timeout_s)
        if isinstance(answer, Refused):
            raise TextRefused(answer.detail, is_unbounded=answer.is_unbounded)
        assert isinstance(answer, answer_type), f"{type(call)} was answered by {type(answer)}"
        return answer

    async def _load(self, load: Load) -> None:
        answer = await self._exchange(load, _LOADING, self._limits.load_timeout_s)
        if isinstance(answer, Unreadable):
            raise TextInvalid(answer.subject, answer.detail)
        assert isinstance(answer, Loaded), f"a load was answered by {type(answer)}"
        self.loaded = answer

    async def _exchange(self, call: Load | Work, work: str, timeout_s: float) -> object:
        self._work = work
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def end(error: KilnError) -> None:
            # The caller learns of it now, however long the process takes to end.
            self.kill(error)
            settle(answered, error)

        try:
            with limiting_time(self.process, work, timeout_s, end):
                self.begin(call, partial(settle, answered))
                return await answered
        except asyncio.CancelledError:
            self.kill()
            raise

    def _explain(self) -> KilnError:
        exit_code = self.process.exit_code
        # How the tokenizer's library ends a process that gets no memory.
        if exit_code == -signal.SIGABRT:
            return self._memory_exceeded()
        return TextProcessLost(self._work, "its forkserver ended" if exit_code is None else name_cause(exit_code))

    def _find_verdict(self, answer: object) -> KilnError | None:
        # What is left of its memory may not do for the next call.
        return self._memory_exceeded() if isinstance(answer, OutOfMemory) else None

    def _memory_exceeded(self) -> TextLimitExceeded:
        return TextLimitExceeded(self._work, f"{self._limits.max_memory_bytes >> 20} MiB of memory")
