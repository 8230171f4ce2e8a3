"""The nursery of a build's ranks: forked from the build process, which has loaded all that ranks need."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler_svc.builds.job import BuildJob
from execution.ranks.forking import check_single_thread
from execution.ranks.nursery import NurseryProcess, RankNursery
from execution.ranks.nursery_process import Nursery
from execution.ranks.parent_death import die_with_parent


@contextmanager
def open_nursery(job: BuildJob, report: socket.socket) -> Iterator[RankNursery | None]:
    """Forks a nursery where a build has several ranks, and ends it afterwards. This process must have one thread still.

    Args:
        report: What the nursery must not hold open.
    """
    if job.spec.config.neuron_config.tp_degree == 1:
        yield None
        return
    with ForkedNursery(report) as nursery:
        yield nursery


class ForkedNursery(RankNursery):
    """One process for ranks of any kind: they set their number of threads themselves, and compute with one."""

    def __init__(self, report: socket.socket) -> None:
        """Forks."""
        super().__init__()
        self._forked = _ForkedProcess(report)

    def open(self, num_threads: int, executable_format: str) -> NurseryProcess:  # noqa: ARG002 - it serves all kinds
        """The process."""
        return self._forked

    def close(self) -> None:
        """Ends the process, and ranks that are left. Calling it again is harmless."""
        self._forked.close()


class _ForkedProcess(NurseryProcess):
    def __init__(self, report: socket.socket) -> None:
        check_single_thread()
        build_pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._return_code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(signal.SIGKILL, build_pid)
                Path("/proc/self/comm").write_text("kiln-nursery")
                self._socket.close()
                report.close()
                Nursery(theirs).serve()
            finally:
                # Not further up: what follows there is the build's.
                os._exit(0)
        theirs.close()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def has_ended(self) -> bool:
        return self._return_code is not None

    def wait_dying(self) -> int:
        if self._return_code is None:
            os.kill(self._pid, signal.SIGKILL)
            self._return_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._return_code
