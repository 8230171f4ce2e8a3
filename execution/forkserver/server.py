"""The forkserver's process: `python -m execution.forkserver.server SOCKET_FD NAME PRELOAD`, PRELOAD being a `Call`.

At the first request it imports what the processes need. It forks a process for each request, waits for the processes,
ends what they leave behind, and reports how they ended. When the last client has hung up, it ends with its processes.

In a forked process only the forking thread exists, and locks that other threads held stay locked. So a forkserver has
one thread, computes nothing, and counts its threads before each fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from bundle.host.confinement import SERVICE, confine
from bundle.host.shortage import name_shortage
from execution.forkserver.descendants import adopt_orphans, end_children
from execution.forkserver.parent_death import die_with_parent, outliving_parent
from execution.forkserver.protocol import (
    Announced,
    Call,
    Ended,
    Forked,
    ForkRequest,
    Refused,
    Report,
    decode_call,
    decode_request,
    encode,
    has_hung_up,
    receive,
)

_STDOUT_FD: Final = 1
_STDERR_FD: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    """A forked process. Its client reads `reports`, and hangs up to end the process."""

    pid: int
    pidfd: int
    reports: socket.socket

    def kill(self) -> None:
        """Kills the process group, which outlives its leader while a compiler runs."""
        # A process that does not lead its group yet has no children.
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.pidfd)
        self.reports.close()


class _Server:
    def __init__(self, preload: Call, connection: socket.socket) -> None:
        self._preload: Call | None = preload
        self._connection = connection
        self._pid, self._parent_pid = os.getpid(), os.getppid()
        self._children: list[_Child] = []
        self._selector = selectors.PollSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._take_request)
        self._has_clients = True
        # Room for the descriptor over which a client learns that there is no room for its process. Without it, the
        # client would take this server for dead, and all its processes with it.
        self._reserve: int | None = None
        self._keep_reserve()

    def serve(self) -> None:
        while self._has_clients:
            for key, _ in self._selector.select():
                key.data()
        for child in list(self._children):
            self._collect(child)

    def _take_request(self) -> None:
        self._give_up_reserve()
        packet, descriptors = receive(self._connection)
        if not packet:
            self._has_clients = False
            return
        request = decode_request(packet)
        if isinstance(request, ForkRequest) and descriptors:
            self._load()
            reports = socket.socket(fileno=descriptors.pop(0))
            reports.setblocking(False)
            self._fork(request, reports, descriptors)
        for fd in descriptors:
            os.close(fd)
        with contextlib.suppress(OSError):
            self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._reserve is None:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _load(self) -> None:
        if self._preload is not None:
            # Modules leave next to no garbage. To look for it while a million objects come took a fifth of the time.
            gc.disable()
            _run(self._preload)
            self._preload = None
            gc.enable()
            # Imported objects stay shared with the processes as long as garbage collectors do not touch them.
            gc.collect()
            gc.freeze()

    def _fork(self, request: ForkRequest, reports: socket.socket, fds: Sequence[int]) -> None:
        # Announce first: by the announcement, a client that hangs up knows whether a process will begin.
        _report(reports, Announced())
        if has_hung_up(reports):
            # The client may have read the announcement even so. Without a report it would take this server for dead.
            _report(reports, Ended(-signal.SIGKILL))
            reports.close()
            return
        try:
            # Fails if some of the request's descriptors found no room, too: then there is none left.
            self._keep_reserve()
            check_single_thread()
            pid = os.fork()
            if pid == 0:
                reports.close()
                self._become_child(request, *fds)
            pidfd = _open_pidfd(pid)
        except (OSError, RuntimeError) as error:
            # The host has no room for the process. The others continue.
            with contextlib.suppress(OSError):
                # Its client may have stopped reading, and the descriptor may not have arrived.
                os.write(fds[0] if fds else _STDERR_FD, traceback.format_exc().encode())
            shortage = name_shortage(error, of_start=True)
            _report(reports, Ended(1) if shortage is None else Refused(**shortage.metadata))
            reports.close()
            return
        child = _Child(pid, pidfd, reports)
        self._children.append(child)
        _report(reports, Forked(pid), child.pidfd)
        for end in (child.pidfd, reports):
            self._selector.register(end, selectors.EVENT_READ, partial(self._collect, child))

    def _become_child(self, request: ForkRequest, stderr_fd: int, *fds: int) -> NoReturn:
        exit_code = 1
        try:
            die_with_parent(signal.SIGKILL, self._pid)
            os.setsid()
            _set_name(request.name)
            self._connection.close()
            self._give_up_reserve()
            for child in self._children:
                child.close()
            os.dup2(stderr_fd, _STDERR_FD)
            os.dup2(stderr_fd, _STDOUT_FD)
            os.close(stderr_fd)
            confine(request.confinement)
            _run(request.call, *fds)
            exit_code = 0
        finally:
            if exit_code != 0:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # Exits here, because the callers' code above belongs to the forkserver.
            os._exit(exit_code)

    def _collect(self, child: _Child) -> None:
        """Reaps a process that has ended, or kills one whose client has hung up."""
        if child not in self._children:
            # Both happened at once.
            return
        # A parent that dies takes clients along. If this process died between the two, what the child had started
        # outside its group would stay for ever.
        with outliving_parent(self._parent_pid):
            # This comes before the kernel can give the id of the leader, and so of the group, to another process.
            child.kill()
            _, status = os.waitpid(child.pid, 0)
            self._children.remove(child)
            # What it had started outside its group is this process's now.
            end_children(spared={one.pid for one in self._children})
        _report(child.reports, Ended(os.waitstatus_to_exitcode(status)))
        for end in (child.pidfd, child.reports):
            self._selector.unregister(end)
        child.close()


def serve(preload: str, connection_fd: int) -> None:
    """Serves until no client is left. Takes over the descriptor of the socket of requests."""
    adopt_orphans()
    with socket.socket(fileno=connection_fd) as connection:
        _Server(decode_call(preload), connection).serve()


def check_single_thread() -> None:
    """Raises RuntimeError if this process has several threads: locks that others hold would stay locked in a fork."""
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if num_threads != 1:
        raise RuntimeError(f"a process with {num_threads} threads cannot be forked")


def _open_pidfd(pid: int) -> int:
    """Opens the descriptor of a child; ends the child, and raises OSError, if there is no room for the descriptor."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _run(call: Call, *fds: int) -> None:
    pkgutil.resolve_name(call.target)(*call.args, *fds)


def _set_name(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def _report(reports: socket.socket, report: Report, *fds: int) -> None:
    with contextlib.suppress(OSError):
        # The client may have hung up.
        socket.send_fds(reports, [encode(report)], fds)


def main(connection_fd: str, name: str, preload: str) -> None:
    """Serves as a separate program."""
    die_with_parent(signal.SIGKILL)
    confine(SERVICE)
    _set_name(name)
    # The output of libraries and compilers must not mix with the service's own.
    os.dup2(_STDERR_FD, _STDOUT_FD)
    serve(preload, int(connection_fd))


if __name__ == "__main__":
    main(*sys.argv[1:])
