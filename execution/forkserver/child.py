"""One forked process, as its client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable

from bundle.errors import ResourcesShort
from bundle.host.shortage import RETRY_AFTER_S
from execution.forkserver.protocol import Announced, Ended, Forked, Refused, decode_report, receive


class ChildProcess:
    """A process that this process has requested from a forkserver.

    Attributes:
        pid: Id of the process and of its process group; None until it is forked.
        exit_code: Negative for the signal that ended it; None until it has ended, and if it ended with its forkserver.
        forkserver_exit_code: Exit code of the forkserver if the process ended with it and this process started it.
        shortage: What the host lacked for the process, which then has not begun; None otherwise.
    """

    def __init__(self, reports: socket.socket, forkserver: subprocess.Popen[bytes] | None) -> None:
        """Takes over the socket of the forkserver's reports and reads it from the running event loop."""
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.forkserver_exit_code: int | None = None
        self.shortage: ResourcesShort | None = None
        self._forkserver = forkserver
        self._reports = reports
        self._reports.setblocking(False)
        self._is_announced = False
        self._pidfd: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(reports.fileno(), self._read)

    @property
    def has_ended(self) -> bool:
        """Whether the process and all that it had started have ended."""
        return self._ended.done()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Makes the event loop call `callback` once, when the process has ended."""
        self._ended.add_done_callback(lambda _: callback())

    async def wait(self) -> int | None:
        """Waits until the process has ended; returns `exit_code`."""
        await asyncio.shield(self._ended)
        if self.shortage is not None:
            raise self.shortage
        return self.exit_code

    def kill(self) -> None:
        """Kills the process with all that it has started. Has no effect if it has ended.

        If the forkserver has not announced the process yet, for it may still be loading, the process never begins.
        """
        if self.has_ended:
            return
        with contextlib.suppress(OSError):
            # The forkserver may have ended.
            self._reports.shutdown(socket.SHUT_WR)
        self._read()
        if not (self._is_announced or self.has_ended):
            self._end(-signal.SIGKILL)

    async def end(self) -> None:
        """Kills the process with all that it has started, and waits until it has ended."""
        self.kill()
        await asyncio.shield(self._ended)

    def _read(self) -> None:
        while not self.has_ended:
            try:
                packet, fds = receive(self._reports)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._outlive_forkserver()
                return
            match decode_report(packet):
                case Announced():
                    self._is_announced = True
                case Forked(pid):
                    # If this process has no descriptor left, the kernel drops the process's.
                    self.pid, self._pidfd = pid, fds[0] if fds else None
                case Refused(resource, detail):
                    self.shortage = ResourcesShort(resource, detail, RETRY_AFTER_S)
                    self._end(1)
                case Ended(exit_code):
                    self._end(exit_code)

    def _outlive_forkserver(self) -> None:
        self._loop.remove_reader(self._reports.fileno())
        if self._forkserver is not None:
            # It has hung up but may not have ended yet.
            self._forkserver.kill()
            self.forkserver_exit_code = self._forkserver.wait()
        if self._pidfd is None:
            self._end(None)
        else:
            self._loop.add_reader(self._pidfd, self._end, None)

    def _end(self, exit_code: int | None) -> None:
        self.exit_code = exit_code
        self._loop.remove_reader(self._reports.fileno())
        self._reports.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            with contextlib.suppress(ChildProcessError):
                # Orphans become children of a container's first process, which this may be.
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            os.close(self._pidfd)
        self._ended.set_result(None)
