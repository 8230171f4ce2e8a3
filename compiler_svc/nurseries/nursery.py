"""The end of a nursery that asks for processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Protocol

from compiler_svc.nurseries.fork_loop import PACKET_SIZE_BYTES
from execution.ranks.parent_death import parent_environment
from execution.threads import SHORT_SPIN_TURNS


class Nursery(Protocol):
    """Where processes of one kind come from."""

    def start(self, request: bytes) -> ForkedProcess:
        """Asks for a process that does what the request says; it begins when the nursery is ready."""


class StartedNursery(Nursery):
    """A nursery of one's own.

    It is started at the first request, and again where it has died. It ends with the thread that started it, and what
    it has forked too.
    """

    def __init__(self, module: str) -> None:
        """Starts nothing yet.

        Args:
            module: What the process runs; called with the number of the socket that requests come through.
        """
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, request: bytes) -> ForkedProcess:
        """Asks for a process; starts the nursery if there is none."""
        if self._socket is None or self._process is None or self._process.poll() is not None:
            if self._socket is not None:
                self._socket.close()
            self._process, self._socket = _start_process(self._module)
        return _ask(self._socket, request)

    def close(self) -> None:
        """Ends it, and what it has forked. Calling it again is harmless."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._socket = self._process = None


class InheritedNursery(Nursery):
    """A nursery that is a relation of this process and has been started by another one."""

    def __init__(self, requests: socket.socket) -> None:
        """Takes the socket that requests are sent through."""
        self._requests = requests

    def start(self, request: bytes) -> ForkedProcess:
        """Asks for a process."""
        return _ask(self._requests, request)


class ForkedProcess:
    """One process, as its nursery tells of it: that it begins, what it says itself, then its exit code."""

    def __init__(self, report: socket.socket) -> None:
        """Takes the socket over that is told."""
        self._report = report
        self._has_begun = False
        #: Exit code, negative for the signal that ended it; None while it runs, and where its nursery died with it.
        self.return_code: int | None = None

    async def follow(self) -> AsyncIterator[bytes]:
        """Gives what the process says, packet by packet, until it has ended."""
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._report, PACKET_SIZE_BYTES):
            self._has_begun = True
            if packet.removeprefix(b"-").isdigit():
                self.return_code = int(packet)
            elif packet != b"null":
                yield packet

    async def end(self) -> None:
        """Ends the process group, if it runs, and waits until it has ended.

        Where the nursery, which may be loading still, has not said that a process begins, none will.
        """
        with contextlib.suppress(OSError):
            # The nursery may have gone.
            self._report.shutdown(socket.SHUT_WR)
        if self._has_begun or self._is_told():
            async for _ in self.follow():
                pass
        self._report.close()

    def _is_told(self) -> bool:
        try:
            self._report.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return True


def _ask(requests: socket.socket, request: bytes) -> ForkedProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # A nursery that is dying may still look alive; what it does not answer ends the process, by name.
    with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(requests, [request], [theirs.fileno()])
    return ForkedProcess(ours)


def _start_process(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={
                    # Builds and ranks compute side by side.
                    "GOMP_SPINCOUNT": str(SHORT_SPIN_TURNS),
                    **os.environ,
                    **parent_environment(),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    # A process with threads cannot be forked. numpy's algebra makes some when it is loaded,
                    "OPENBLAS_NUM_THREADS": "1",
                    # and Inductor a pool of processes, whose answers it reads in a thread.
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                },
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours
