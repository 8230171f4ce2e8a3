"""The nursery's process: `python -m compiler_svc.builds.nursery_process SOCKET_FD`.

Loads torch and transformers once, and forks a build process from what it has loaded whenever the service asks for one.
A build process leads a process group, which ends with it. Ends with its builds when the service closes the socket.

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
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from execution.executor import preload
from execution.forking import check_single_thread
from execution.parent_death import die_with_parent

_PATH_SIZE_BYTES: Final = 1 << 12
#: What a build imports sooner or later, beside its own code.
_LOADED: Final = ("torch.export._trace", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    """A build process; the service hears of it through `report`, and hangs up to have it ended."""

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


class Nursery:
    """Forks build processes and waits for them."""

    def __init__(self, service: socket.socket, run_job: Callable[[Path, socket.socket, int], None]) -> None:
        """Takes the socket over, and what a build process does; see `process.run_job`."""
        self._service = service
        self._run_job = run_job
        self._pid = os.getpid()
        self._children: list[_Child] = []

    def serve(self) -> None:
        """Serves until the service hangs up; no build is left then."""
        while self._wait():
            pass
        for child in list(self._children):
            self._collect(child)

    def _wait(self) -> bool:
        """Does what there is to do next; False where the service has hung up."""
        poll = select.poll()
        poll.register(self._service, select.POLLIN)
        for child in self._children:
            poll.register(child.pidfd, select.POLLIN)
            poll.register(child.report, select.POLLRDHUP)
        ready = {fd for fd, _ in poll.poll()}
        for child in list(self._children):
            if child.pidfd in ready or child.report.fileno() in ready:
                self._collect(child)
        if self._service.fileno() not in ready:
            return True
        path, descriptors, _, _ = socket.recv_fds(self._service, _PATH_SIZE_BYTES, 1)
        if path:
            self._fork(Path(os.fsdecode(path)), socket.socket(fileno=descriptors[0]))
        return bool(path)

    def _fork(self, directory: Path, report: socket.socket) -> None:
        # In this order, so that a service that hangs up knows whether there is something to wait for.
        _tell(report, b"null")
        if _has_hung_up(report):
            report.close()
            return
        try:
            check_single_thread()
            pid = os.fork()
        except (OSError, RuntimeError):
            # The host has no room for the build, which is no reason to end the others.
            traceback.print_exc()
            _tell(report, b"1")
            report.close()
            return
        if pid == 0:
            self._become_build(directory, report)
        self._children.append(_Child(pid, os.pidfd_open(pid), report))

    def _become_build(self, directory: Path, report: socket.socket) -> NoReturn:
        """Goes on as a build, in the forked process."""
        return_code = 1
        try:
            os.setsid()
            Path("/proc/self/comm").write_text("kiln-build")
            self._service.close()
            for child in self._children:
                child.close()
            self._run_job(directory, report, self._pid)
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
        # The service may have gone, or not have read the progress before.
        report.send(packet, socket.MSG_DONTWAIT)


def _has_hung_up(report: socket.socket) -> bool:
    poll = select.poll()
    poll.register(report, select.POLLRDHUP)
    return bool(poll.poll(0))


def main(socket_fd: int) -> None:
    """Serves one service until it hangs up."""
    die_with_parent(signal.SIGKILL)
    Path("/proc/self/comm").write_text("kiln-builds")
    # What libraries and compilers print would be taken for the service's own.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Takes seconds, with torch, and by now the process dies with its parent.
    from compiler_svc.builds.process import run_job  # noqa: PLC0415

    for module in _LOADED:
        import_module(module)
    preload("exported_program")
    # What has been loaded stays shared with the builds as long as their collectors leave it alone.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=socket_fd) as service:
        Nursery(service, run_job).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
