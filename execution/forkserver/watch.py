"""Notices a forkserver that does not answer: while it is stopped, no process starts and no end of one is reported."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Final

from execution.forkserver.protocol import Ping, encode, has_hung_up
from execution.stall import LOOKS_PER_TIMEOUT, Stall, Watch

#: Seconds that a forkserver may stand still before it answers, if no option says otherwise.
PATIENCE_S: Final = 30.0

_log = logging.getLogger(__name__)


class ForkserverWatch:
    """Pings one forkserver as long as it lives, and ends it if it owes an answer and stands still.

    One that computes has as long as it takes, for it may be importing.
    """

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        patience_s: float,
        *,
        find_pid: Callable[[], int | None],
        end: Callable[[], None],
    ) -> None:
        """Begins to ping, from the running event loop. `find_pid` returns None while it has not been forked."""
        self._name = name
        self._connection = connection
        self._patience_s = patience_s
        self._find_pid = find_pid
        self._end = end
        self._ping: socket.socket | None = None
        self._num_pings = 0
        interval_s = patience_s / LOOKS_PER_TIMEOUT
        self._stall = Stall(interval_s)
        self._watch = Watch(interval_s, self._look)

    def stop(self) -> None:
        """Pings no more. Calling it again is harmless."""
        self._watch.stop()
        self._forget_ping()

    def _look(self) -> None:
        if has_hung_up(self._connection):
            # It has ended, and its processes with it.
            self.stop()
            return
        if self._ping is None or has_hung_up(self._ping):
            try:
                self._send_ping()
            except OSError:
                # This process has no descriptors for a ping, so the forkserver owes no answer.
                self._stall.look(None, [])
                return
        pid = self._find_pid()
        self._stall.look(None if pid is None else self._num_pings, [] if pid is None else [pid])
        if self._stall.still_s >= self._patience_s:
            _log.error("forkserver hung", extra={"forkserver": self._name, "pid": pid})
            self.stop()
            self._end()

    def _send_ping(self) -> None:
        self._forget_ping()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._connection, [encode(Ping())], [theirs.fileno()], socket.MSG_DONTWAIT)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                # Requests that it has not read fill the socket, so it owes an answer; or it has ended.
                ours.close()
                return
            except OSError:
                ours.close()
                raise
        self._ping = ours
        self._num_pings += 1

    def _forget_ping(self) -> None:
        if self._ping is not None:
            self._ping.close()
            self._ping = None
