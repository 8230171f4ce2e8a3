"""The parent's side of one rank process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import IO, Final

from bundle.errors import KilnError
from bundle.host.confinement import RANK
from execution.errors import RankDied, RankLost
from execution.forkserver.client import STDERR_FD, ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.worker import Worker
from execution.ranks.control import Done, Launch, Load, Loaded, decode_answer

LogSink = Callable[[int, str], None]

_SERVE: Final = Call("execution.ranks.process:serve_parent")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a rank's load: `done` of `total` parts; `part` is the one just loaded."""

    rank: int
    done: int
    total: int
    part: str


class LogPipe:
    """Reads a pipe as data arrives, and passes its lines to a sink."""

    def __init__(self, pipe: IO[bytes], sink: Callable[[str], None]) -> None:
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


class RankHandle(Worker):
    """One rank process."""

    #: A step may end.
    grace_s = 2.0

    def __init__(
        self,
        launch: Launch,
        forkserver: ForkserverClient,
        memory_fds: Sequence[int],
        log_sink: LogSink | None,
        on_death: Callable[[RankHandle], None],
    ) -> None:
        """Requests the process.

        `memory_fds` are descriptors of the step memory and, if ranks exchange tensors through the host, of the memory
        for that.
        """
        self.rank = launch.rank
        self._launch = launch
        with ExitStack() as theirs, ExitStack() as log:
            stderr_fd = STDERR_FD
            if log_sink is not None:
                log_fd, stderr_fd = os.pipe()
                theirs.callback(os.close, stderr_fd)
                pipe = LogPipe(os.fdopen(log_fd, "rb", buffering=0), partial(log_sink, self.rank))
                log.callback(pipe.close)
            super().__init__(
                forkserver,
                _SERVE,
                memory_fds,
                decode=decode_answer,
                name=f"kiln-rank-{self.rank}",
                confinement=RANK,
                stderr_fd=stderr_fd,
                on_death=on_death,
            )
            self.process.on_end(log.pop_all().close)

    async def launch(self) -> None:
        """Waits until the process accepts calls."""
        await self.ask(self._launch, Done)

    async def load(self, num_parts: int, progress: Callable[[LoadProgress], None] | None) -> Loaded:
        """Loads what it executes, and reports each of so many parts."""
        done = count(1)

        def report(part: str) -> None:
            if progress is not None:
                progress(LoadProgress(self.rank, next(done), num_parts, part))

        return await self.ask(Load(), Loaded, report)

    def _explain(self) -> KilnError:
        codes = (self.process.exit_code, self.process.forkserver_exit_code, -signal.SIGKILL)
        return RankDied(self.rank, next(code for code in codes if code is not None))

    def _find_verdict(self, answer: object) -> KilnError | None:
        if isinstance(answer, RankLost):
            answer.rank = self.rank
            return answer
        return None
