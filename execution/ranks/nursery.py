"""A parent's end of the processes that its rank processes are forked from."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from execution.ranks.control import Fork, encode
from execution.ranks.parent_death import parent_environment
from execution.threads import thread_environment


class RankNursery:
    """Where rank processes come from: a process that has torch loaded, and forks.

    It is started at the first use, and again where it has died. There is one for each number of threads, because
    that is read when torch is loaded, and for each format of executables, because loading what a format needs takes a
    second in which no rank's end would be told. They end with the thread that used them first, and their ranks too.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """Starts nothing yet.

        Args:
            num_ranks: Ranks that may compute at the same time. Their threads spin for each other where each has a
                processor; see `execution.threads`.
        """
        self._num_ranks = num_ranks
        self._processes: dict[tuple[int, str], NurseryProcess] = {}

    def open(self, num_threads: int, executable_format: str) -> NurseryProcess:
        """The process for ranks that compute with so many threads and load that format; starts it if there is none."""
        kind = (num_threads, executable_format)
        process = self._processes.get(kind)
        if process is None or process.has_ended:
            if process is not None:
                process.close()
            process = self._processes[kind] = NurseryProcess(num_threads, executable_format, num_ranks=self._num_ranks)
        return process

    def close(self) -> None:
        """Ends the processes, and ranks that are left. Calling it again is harmless."""
        while self._processes:
            self._processes.popitem()[1].close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()


class NurseryProcess:
    """One process; see `RankNursery`."""

    def __init__(self, num_threads: int, executable_format: str, *, num_ranks: int) -> None:
        """Starts it. It takes requests at once, and answers them when it has loaded torch."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "execution.ranks.nursery_process", str(theirs.fileno()), executable_format],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=_child_environment(num_threads, num_ranks),
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def fork(self, call: Fork, descriptors: Sequence[int]) -> None:
        """Asks for a rank process.

        Args:
            descriptors: See `Fork`. The first one's peer is told what happens; it reads the end of the file where the
                nursery dies.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # Its end is noticed by who awaits its reports.
            socket.send_fds(self._socket, [encode(call)], list(descriptors))

    def wait_dying(self) -> int:
        """Return code, negative for a signal, of a process that hung up."""
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Ends it, and ranks that are left."""
        self._socket.close()
        self.wait_dying()


def _child_environment(num_threads: int, num_ranks: int) -> dict[str, str]:
    return {
        **os.environ,
        **parent_environment(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **thread_environment(num_threads, num_ranks=num_ranks),
        # numpy's algebra makes its threads when it is loaded, and a process with threads cannot be forked.
        "OPENBLAS_NUM_THREADS": "1",
    }
