"""The nursery of all builds' lowerings: forked from the one of builds, which has torch loaded."""

from __future__ import annotations

import os
import socket

from compiler_svc.lower import nursery_process
from compiler_svc.nurseries.fork_loop import ForkLoop
from compiler_svc.nurseries.nursery import InheritedNursery, Nursery
from execution.ranks.forking import check_single_thread


class ForkedLowerings:
    """Keeps one nursery of lowerings alive, for builds that are forked afterwards."""

    def __init__(self) -> None:
        """Forks nothing yet."""
        self._pid: int | None = None
        self._requests: socket.socket | None = None

    @property
    def nursery(self) -> Nursery:
        """The nursery, as a build process inherits it."""
        assert self._requests is not None, "a build is forked after the nursery of its lowerings"
        return InheritedNursery(self._requests)

    def ensure(self, builds: ForkLoop) -> None:
        """Forks it, if there is none or it has died.

        Args:
            builds: The loop of this process, whose sockets the nursery must not hold open.
        """
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            return
        self._pid = None
        if self._requests is not None:
            # Builds that run have the old one still, and fail at their next lowering.
            self._requests.close()
        check_single_thread()
        parent_pid = os.getpid()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    self._requests.close()
                    builds.abandon()
                    nursery_process.serve(theirs, parent_pid)
                finally:
                    # Not further up: what follows there is the parent's.
                    os._exit(0)
