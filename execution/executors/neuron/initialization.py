"""Initializes libnrt, and says who has the cores if that fails."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from execution.device_errors import DeviceBusy
from execution.executors.neuron.status import FAILURE, tell_status

logger = logging.getLogger(__name__)

_DEVICE: Final = re.compile(r"/dev/neuron\d+$")
#: A process that hangs in its call must not keep all others from their cores.
_MAX_LOCK_WAIT_S: Final = 60.0
_LOCK_PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Initialization:
    """How a process calls `nrt_init`, which fails with NRT_FAILURE for cores of others, and for other reasons, too.

    Attributes:
        lock: File that each process holds locked for the call: those that take cores within milliseconds of each other
            fail. It lies where every user may write, where services with a `/tmp` of their own meet, and where
            containers may write although their root is read-only.
        processes: Directory of this host's processes, `/proc`.
        retry_for_s: How long the call is made again while no process can be seen that has a device open.
        pause_s: Time between two calls.
    """

    lock: Path = Path("/dev/shm/kiln-neuron-init.lock")
    processes: Path = Path("/proc")
    retry_for_s: float = 60.0
    pause_s: float = 0.5

    def run(self, call: Callable[[], int], cores: str) -> int:
        """Calls `nrt_init` at least twice before it gives up; returns its status, which is not NRT_FAILURE.

        Args:
            call: Makes the call, and returns its status.
            cores: The cores that this process is to take, for the error.

        Raises:
            DeviceBusy: The call fails while another process has a device open, or for `retry_for_s`.
        """
        end_s = time.monotonic() + self.retry_for_s
        is_repeated = False
        while True:
            with _locked(self.lock):
                code = call()
            if code != FAILURE:
                return code
            holder = _find_holder(self.processes)
            if is_repeated and holder is not None:
                raise DeviceBusy(cores, tell_status(code), holder)
            if is_repeated and time.monotonic() > end_s:
                cause = (
                    f"nrt_init fails for {self.retry_for_s:g} s now, and no process is seen that has a device open: one"
                    " of another user or container has them, or the driver does not work (sudo dmesg | grep -i neuron)"
                )
                raise DeviceBusy(cores, tell_status(code), cause)
            is_repeated = True
            time.sleep(self.pause_s)


#: That of ranks.
IN_RANKS: Final = Initialization()


def _find_holder(processes: Path) -> str | None:
    """Looks for another process that has a device open, among those whose descriptors this one may see."""
    for process in processes.glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            opened = [str(link.readlink()) for link in (process / "fd").iterdir()]
        except OSError:  # it is another user's, or has just ended or closed one
            continue
        for path in filter(_DEVICE.search, opened):
            return f"process {process.name} has {path} open"
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file locked, if that can be had: calls that fail without it are repeated."""
    try:
        fd = _open_lock(path)
    except OSError as error:
        logger.warning("nrt_init is called without a lock: %s cannot be opened (%s)", path, error.strerror)
        yield
        return
    end_s = time.monotonic() + _MAX_LOCK_WAIT_S
    try:
        while not _take_lock(fd) and time.monotonic() < end_s:
            time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # Only now: where every user may write, the kernel refuses this flag for files of other users.
        return os.open(path, flags | os.O_CREAT, 0o644)


def _take_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
