"""The service's end of the process that build processes are forked from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from compiler_svc.records import Progress
from execution.parent_death import parent_environment

#: No packet is longer: one progress.
_PACKET_SIZE_BYTES: Final = 1 << 16


class BuildNursery:
    """Where build processes come from: a process that has torch and transformers loaded, and forks.

    It is started at the first build, and again where it has died. It ends with the thread that started it, and its
    builds too.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, directory: Path) -> BuildProcess:
        """Asks for a process that runs the job of a directory; it begins when the nursery is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # A nursery that is dying may still look alive; what it does not answer ends the build, by name.
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._open(), [os.fsencode(directory)], [theirs.fileno()])
        return BuildProcess(ours)

    def _open(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.poll() is not None:
            if self._socket is not None:
                self._socket.close()
            self._process, self._socket = _start_process()
        return self._socket


class BuildProcess:
    """One build process, as its nursery tells of it: that it begins, then its progress, then its exit code."""

    def __init__(self, report: socket.socket) -> None:
        """Takes the socket over that is told."""
        self._report = report
        self._has_begun = False
        #: Exit code, negative for the signal that ended it; None while it runs, and where its nursery died with it.
        self.return_code: int | None = None

    async def follow(self) -> AsyncIterator[Progress]:
        """Gives the progress of the build, until its process has ended."""
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._report, _PACKET_SIZE_BYTES):
            self._has_begun = True
            told = msgspec.json.decode(packet, type=Progress | int | None)
            if isinstance(told, int):
                self.return_code = told
            elif told is not None:
                yield told

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


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "compiler_svc.builds.nursery_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **parent_environment(),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    # numpy's algebra makes its threads when it is loaded, and a process with threads cannot be forked.
                    "OPENBLAS_NUM_THREADS": "1",
                },
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours
