"""What a nursery does: fork a process for each request, and wait for those.

A forked process leads a process group, which ends with it. Whoever asked is told through a socket that came with the
request, in packets:

null            a process begins; nothing is told before
a number        its exit code, negative for a signal; the last packet
anything else   what the process itself says

Only the thread that forks goes on in a forked process, and locks that others held stay locked. So a nursery has one
thread, computes nothing, and looks before each fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from execution.ranks.forking import check_single_thread

#: No packet is longer.
PACKET_SIZE_BYTES: Final = 1 << 16

#: What a forked process does: called with the request, with the socket of who asked, and with the nursery's process id.
Run = Callable[[bytes, socket.socket, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    """A forked process; who asked for it hears of it through `report`, and hangs up to have it ended."""

    pid: int
    pidfd: int
    report: socket.socket

    def kill(self) -> None:
        """Ends the group: it outlives its leader where a compiler is still at work."""
        # It may not lead one yet; then it has no children either.
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.pidfd)
        self.report.close()


class ForkLoop:
    """Forks processes and waits for them."""

    def __init__(self, requests: socket.socket, name: str, run: Run, prepare: Callable[[], None]) -> None:
        """Takes the socket over that requests come through.

        Args:
            name: Of the forked processes, as process lists show it; 15 bytes at most.
            prepare: Called before each fork; may load what is not loaded yet.
        """
        self._requests = requests
        self._name = name
        self._run = run
        self._prepare = prepare
        self._pid = os.getpid()
        self._children: list[_Child] = []
        #: Of whoever waits for a process that is about to be forked.
        self._asking: socket.socket | None = None

    def serve(self) -> None:
        """Serves until nobody can ask any more; no forked process is left then."""
        while self._wait():
            pass
        for child in list(self._children):
            self._collect(child)

    def abandon(self) -> None:
        """Lets go of all that a process must not hold open which was forked from this one."""
        self._requests.close()
        for child in self._children:
            child.close()
        if self._asking is not None:
            self._asking.close()

    def _wait(self) -> bool:
        """Does what there is to do next; False where nobody can ask any more."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        for child in self._children:
            poll.register(child.pidfd, select.POLLIN)
            poll.register(child.report, select.POLLRDHUP)
        ready = {fd for fd, _ in poll.poll()}
        for child in list(self._children):
            if child.pidfd in ready or child.report.fileno() in ready:
                self._collect(child)
        if self._requests.fileno() not in ready:
            return True
        request, descriptors, _, _ = socket.recv_fds(self._requests, PACKET_SIZE_BYTES, 1)
        if request:
            self._answer(request, socket.socket(fileno=descriptors[0]))
        return bool(request)

    def _answer(self, request: bytes, report: socket.socket) -> None:
        # In this order, so that who hangs up knows whether there is something to wait for.
        _tell(report, b"null")
        if _has_hung_up(report):
            report.close()
            return
        self._asking = report
        try:
            self._prepare()
            check_single_thread()
            pid = os.fork()
        except (OSError, RuntimeError):
            # The host has no room for the process, which is no reason to end the others.
            traceback.print_exc()
            _tell(report, b"1")
            report.close()
            return
        finally:
            self._asking = None
        if pid == 0:
            self._become_child(request, report)
        self._children.append(_Child(pid, os.pidfd_open(pid), report))

    def _become_child(self, request: bytes, report: socket.socket) -> NoReturn:
        """Goes on in the forked process."""
        return_code = 1
        try:
            os.setsid()
            Path("/proc/self/comm").write_text(self._name)
            self.abandon()
            self._run(request, report, self._pid)
            return_code = 0
        finally:
            if return_code != 0:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # Not further up: what follows there is the nursery's.
            os._exit(return_code)

    def _collect(self, child: _Child) -> None:
        # Before the leader is waited for: until then no other process gets its number.
        child.kill()
        _, status = os.waitpid(child.pid, 0)
        _tell(child.report, str(os.waitstatus_to_exitcode(status)).encode())
        self._children.remove(child)
        child.close()


def _tell(report: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):
        # Who asked may have gone, or not have read what came before.
        report.send(packet, socket.MSG_DONTWAIT)


def _has_hung_up(report: socket.socket) -> bool:
    poll = select.poll()
    poll.register(report, select.POLLRDHUP)
    return bool(poll.poll(0))
