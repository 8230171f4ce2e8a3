"""The client's side of a forkserver: it requests processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from bundle.host.confinement import SERVICE, Confinement
from bundle.host.environment import Kind, inherit
from bundle.host.shortage import naming_shortages
from execution.forkserver.child import ChildProcess
from execution.forkserver.parent_death import parent_environment
from execution.forkserver.protocol import Call, ForkRequest, encode, has_hung_up
from execution.forkserver.watch import PATIENCE_S, ForkserverWatch

_MODULE: Final = "execution.forkserver.server"
#: Standard error, which a child shares with this process unless it gets another one.
STDERR_FD: Final = 2


class ForkserverClient:
    """A connection to a forkserver that another process has started."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> socket.socket:
        """Returns the connection. A process that inherits it can be a client too."""
        assert self._connection is not None, "a client is connected"
        return self._connection

    def start(
        self,
        call: Call,
        fds: Sequence[int] = (),
        *,
        name: str,
        stderr_fd: int = STDERR_FD,
        confinement: Confinement = SERVICE,
    ) -> ChildProcess:
        """Requests a process, which begins when the forkserver is ready. Needs a running event loop.

        Args:
            call: The function that the process calls. It exits with 0 when the function returns, with 1 if it raises.
            fds: Descriptors that the function takes after the call's arguments. The process gets copies.
            name: Name of the process in process lists; at most 15 bytes.
            stderr_fd: Standard error and standard output of the process and of all that it starts.
        """
        with naming_shortages(of_start=True):
            connection = self.connect()
            reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            child = ChildProcess(reports, self._process)
            with theirs:
                try:
                    request = encode(ForkRequest(name=name, call=call, confinement=confinement))
                    socket.send_fds(connection, [request], [theirs.fileno(), stderr_fd, *fds])
                except (BrokenPipeError, ConnectionResetError):
                    # The forkserver has just died. Closing their end tells the child so.
                    pass
                except OSError:
                    child.kill()
                    raise
        return child


class Forkserver(ForkserverClient):
    """A forkserver that this process starts.

    It starts at the first use, and again after it has died; a watch ends it if it hangs. When the thread that used it
    first ends, it ends too, with the processes that it forked.
    """

    def __init__(
        self,
        name: str,
        preload: Call,
        *,
        kind: Kind = "any",
        environment: Mapping[str, str] | None = None,
        parent: ForkserverClient | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: Name of the forkserver in process lists; at most 15 bytes.
            preload: Imports what the processes need. Called once, before the first fork.
            kind: Says what it inherits of this process's variables, and so what the processes have that it forks.
            environment: Variables added to these.
            parent: The forkserver from which this one is forked, to share its imports and environment. None starts a
                program.
            patience_s: Seconds that it may stand still while it owes an answer; then it counts as hung.
        """
        assert not (environment and parent), "a forked process has the environment of its parent"
        self._name = name
        self._preload = encode(preload).decode()
        self._kind = kind
        self._environment = environment or {}
        self._parent = parent
        self._connection = self._process = None
        self._forked: ChildProcess | None = None
        self._patience_s = patience_s
        self._watch: ForkserverWatch | None = None

    def connect(self) -> socket.socket:
        """Returns the connection; starts the forkserver if it does not run. Needs a running event loop."""
        if self._connection is None or has_hung_up(self._connection):
            self.close()
            with naming_shortages(of_start=True), contextlib.ExitStack() as unused:
                connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                unused.enter_context(connection)
                with theirs:
                    self._launch(theirs.fileno())
                unused.pop_all()
            self._connection = connection
            self._watch = ForkserverWatch(
                self._name, self._connection, self._patience_s, find_pid=self._find_pid, end=self._kill
            )
        return self._connection

    def close(self) -> None:
        """Ends the forkserver and the processes that it forked. Calling it again is harmless."""
        if self._connection is not None:
            if self._watch is not None:
                self._watch.stop()
            self._connection.close()
            self._connection = None
            self._kill()
            if self._process is not None:
                self._process.wait()

    def _find_pid(self) -> int | None:
        process = self._forked or self._process
        return None if process is None else process.pid

    def _kill(self) -> None:
        if self._forked is not None:
            self._forked.kill()
        if self._process is not None:
            self._process.kill()

    def _launch(self, connection_fd: int) -> None:
        if self._parent is not None:
            call = Call(f"{_MODULE}:serve", (self._preload,))
            self._forked = self._parent.start(call, [connection_fd], name=self._name)
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(connection_fd), self._name, self._preload],
            pass_fds=(connection_fd,),
            stdin=subprocess.DEVNULL,
            env={
                **inherit(self._kind),
                **parent_environment(),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # numpy's linear algebra starts threads on import, and a process with threads cannot be forked.
                "OPENBLAS_NUM_THREADS": "1",
                **self._environment,
            },
            start_new_session=True,
        )
