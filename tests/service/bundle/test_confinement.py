"""Limits of processes, each tried in a process of its own, because none can widen them again."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from bundle.confinement import BUILD, LOWERING, PLAN, RANK, SERVICE, TEXT, Confinement, confine

_PR_GET_DUMPABLE: Final = 3
KINDS: Final = {"service": SERVICE, "rank": RANK, "text": TEXT, "build": BUILD, "lowering": LOWERING, "plan": PLAN}


def run_apart(act: Callable[[], None]) -> int:
    """Runs a function in a forked process, and returns the status with which that ended: 0 unless it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        # What earlier tests have left, such as channels of gRPC, is not for this process to collect.
        gc.disable()
        # What the tests run under may have many files open, and a shell's background job ignores this signal.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - this process must not go on as the test
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_program_gains_privileges_and_no_core_is_written(kind: str) -> None:
    def look() -> None:
        confine(KINDS[kind])
        assert "NoNewPrivs:\t1" in Path("/proc/self/status").read_text()
        assert max(resource.getrlimit(resource.RLIMIT_CORE)) <= 1
        assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE) == (0 if KINDS[kind].is_private else 1)

    assert run_apart(look) == 0


def test_a_fault_writes_no_memory_to_the_disk(tmp_path: Path) -> None:
    def fault() -> None:
        os.chdir(tmp_path)
        with suppress(ValueError, OSError):
            # The host may write no cores anyway; only root may ask for them then.
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        confine(SERVICE)
        os.kill(os.getpid(), signal.SIGQUIT)

    status = run_apart(fault)
    assert (os.WTERMSIG(status), os.WCOREDUMP(status)) == (signal.SIGQUIT, False)
    assert list(tmp_path.iterdir()) == []


def test_files_are_counted_and_measured(tmp_path: Path) -> None:
    def overrun() -> None:
        confine(Confinement(open_files=16, file_size_bytes=1000))
        with (tmp_path / "long").open("wb", buffering=0) as file:
            assert file.write(bytes(1001)) == 1000
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                file.write(b"1")
        with suppress(OSError):
            while os.dup(0) < 15:
                pass
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            os.dup(0)

    assert run_apart(overrun) == 0


def test_memory_is_limited_and_what_is_used_counts() -> None:
    def overrun() -> None:
        with pytest.raises(MemoryError, match="from the start"):
            confine(Confinement(data_bytes=1 << 20))
        confine(Confinement(data_bytes=1 << 31))
        with pytest.raises(MemoryError):
            bytearray(1 << 32)

    assert run_apart(overrun) == 0


def test_limits_only_narrow() -> None:
    def widen() -> None:
        confine(Confinement(open_files=64))
        confine(Confinement(open_files=128))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)

    assert run_apart(widen) == 0
