"""A nursery's process: `python -m execution.ranks.nursery_process SOCKET_FD EXECUTABLE_FORMAT`.

Loads torch once, and forks a rank process from what it has loaded whenever its parent asks for one. Tells the parent of
the rank's end, which the parent cannot collect itself. Ends with its ranks when the parent closes the socket.

Only the thread that forks goes on in a forked process, and locks that others held stay locked. So this process has one
thread, computes nothing, and looks before each fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from execution.executors.executor import preload
from execution.ranks.control import PACKET_SIZE_BYTES, Ended, Fork, Forked, decode_fork, encode
from execution.ranks.forking import check_single_thread
from execution.ranks.parent_death import die_with_parent
from execution.ranks.process import serve_parent

#: Report, launch, standard error, control, step memory, collective memory.
_MOST_DESCRIPTORS: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    """A rank process; `report` is where its parent hears of it."""

    pid: int
    pidfd: int
    report: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.report.close()


class Nursery:
    """Forks rank processes and waits for them."""

    def __init__(self, parent: socket.socket) -> None:
        """Takes the socket over."""
        self._parent = parent
        self._pid = os.getpid()
        self._children: list[_Child] = []

    def serve(self) -> None:
        """Serves the parent until it hangs up; no rank is left then."""
        while self._wait():
            pass
        for child in self._children:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in self._children:
            os.waitpid(child.pid, 0)

    def _wait(self) -> bool:
        """Does what there is to do next; False where the parent has hung up."""
        poll = select.poll()
        poll.register(self._parent, select.POLLIN)
        for child in self._children:
            poll.register(child.pidfd, select.POLLIN)
            poll.register(child.report, 0)
        ready = {fd for fd, _ in poll.poll()}
        for child in list(self._children):
            if child.pidfd in ready:
                self._collect(child)
            elif child.report.fileno() in ready:
                # Nobody is left who would end it.
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
                self._collect(child)
        if self._parent.fileno() not in ready:
            return True
        packet, descriptors, _, _ = socket.recv_fds(self._parent, PACKET_SIZE_BYTES, _MOST_DESCRIPTORS)
        if packet:
            self._answer(decode_fork(packet), descriptors)
        return bool(packet)

    def _answer(self, call: Fork, descriptors: Sequence[int]) -> None:
        report_fd, *own = descriptors
        report = socket.socket(fileno=report_fd)
        try:
            if not _is_heard(report):
                # The rank is no longer wanted; its parent may be many seconds ahead of a nursery that has just begun.
                report.close()
                return
            self._fork(call, report, own)
        finally:
            for fd in own:
                os.close(fd)

    def _fork(self, call: Fork, report: socket.socket, own: Sequence[int]) -> None:
        try:
            check_single_thread()
            pid = os.fork()
        except (OSError, RuntimeError):
            # The host has no room for the rank, which is no reason to end the others.
            os.write(own[0], traceback.format_exc().encode())
            _send(report, Ended(return_code=1))
            report.close()
            return
        if pid == 0:
            self._become_rank(call, report, own)
        child = _Child(pid, os.pidfd_open(pid), report)
        self._children.append(child)
        _send(report, Forked(), child.pidfd)

    def _become_rank(self, call: Fork, report: socket.socket, own: Sequence[int]) -> NoReturn:
        """Goes on as a rank, in the forked process."""
        return_code = 1
        try:
            die_with_parent(signal.SIGKILL, self._pid)
            os.setsid()
            Path("/proc/self/comm").write_text(f"kiln-rank-{call.rank}")
            report.close()
            self._parent.close()
            for child in self._children:
                child.close()
            stderr_fd, launch_fd, control_fd, *memory_fds = own
            os.dup2(stderr_fd, sys.stderr.fileno())
            os.dup2(stderr_fd, sys.stdout.fileno())
            os.close(stderr_fd)
            serve_parent(control_fd, launch_fd, *memory_fds)
            return_code = 0
        finally:
            if return_code != 0:
                traceback.print_exc()
            sys.stderr.flush()
            # Not further up: what follows there is the nursery's.
            os._exit(return_code)

    def _collect(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        _send(child.report, Ended(return_code=os.waitstatus_to_exitcode(status)))
        self._children.remove(child)
        child.close()


def _send(report: socket.socket, message: Forked | Ended, *descriptors: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # Where nobody listens, the next wait ends the rank.
        socket.send_fds(report, [encode(message)], descriptors)


def _is_heard(report: socket.socket) -> bool:
    poll = select.poll()
    poll.register(report, 0)
    return not poll.poll(0)


def main(socket_fd: int, executable_format: str) -> None:
    """Serves one parent until it hangs up."""
    die_with_parent(signal.SIGKILL)
    Path("/proc/self/comm").write_text("kiln-nursery")
    # Now, because the ends of ranks are to be told at once later.
    preload(executable_format)
    # What has been loaded stays shared with the ranks as long as their collectors leave it alone.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=socket_fd) as parent:
        Nursery(parent).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
