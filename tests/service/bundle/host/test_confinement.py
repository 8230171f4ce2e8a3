"""Limits of processes, each tried in a process of its own, because none can widen them again."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from bundle.host.confinement import BUILD, LOWERING, PLAN, RANK, SERVICE, TEXT, Confinement, confine

_PR_GET_DUMPABLE: Final = 3
_CONTEXT: Final = multiprocessing.get_context("forkserver")
KINDS: Final = {"service": SERVICE, "rank": RANK, "text": TEXT, "build": BUILD, "lowering": LOWERING, "plan": PLAN}


def run_apart(act: Callable[..., None], *arguments: object) -> int | None:
    """Runs a function in a process of its own, and returns its exit code: 0 unless it raised.

    The process is forked from a clean one: threads and objects of gRPC that other tests have left in this one abort in
    a child of few files.
    """
    process = _CONTEXT.Process(target=_run, args=(act, *arguments))
    process.start()
    process.join()
    return process.exitcode


def _run(act: Callable[..., None], *arguments: object) -> None:
    # What the tests run under may have many files open, and a shell's background job ignores this signal.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    act(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_no_program_gains_privileges_and_no_core_is_written(kind: str) -> None:
    assert run_apart(_look, kind) == 0


def _look(kind: str) -> None:
    confine(KINDS[kind])
    assert "NoNewPrivs:\t1" in Path("/proc/self/status").read_text()
    assert max(resource.getrlimit(resource.RLIMIT_CORE)) <= 1
    assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE) == (0 if KINDS[kind].is_private else 1)


def test_a_fault_writes_no_memory_to_the_disk(tmp_path: Path) -> None:
    assert run_apart(_see_a_fault, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def _see_a_fault(directory: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.chdir(directory)
        with suppress(ValueError, OSError):
            # The host may write no cores anyway; only root may ask for them then.
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        confine(SERVICE)
        os.kill(os.getpid(), signal.SIGQUIT)
    status = os.waitpid(pid, 0)[1]
    assert (os.WTERMSIG(status), os.WCOREDUMP(status)) == (signal.SIGQUIT, False)


def _overrun_files(directory: Path) -> None:
    confine(Confinement(open_files=16, file_size_bytes=1000))
    with (directory / "long").open("wb", buffering=0) as file:
        assert file.write(bytes(1001)) == 1000
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            file.write(b"1")
    with suppress(OSError):
        while os.dup(0) < 15:
            pass
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        os.dup(0)


def _overrun_memory(_directory: Path) -> None:
    with pytest.raises(MemoryError, match="from the start"):
        confine(Confinement(data_bytes=1 << 20))
    confine(Confinement(data_bytes=1 << 31))
    with pytest.raises(MemoryError):
        bytearray(1 << 32)


def _widen(_directory: Path) -> None:
    confine(Confinement(open_files=64))
    confine(Confinement(open_files=128))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)


@pytest.mark.parametrize("act", [_overrun_files, _overrun_memory, _widen])
def test_files_are_counted_and_measured_memory_is_limited_and_limits_only_narrow(
    tmp_path: Path, act: Callable[[Path], None]
) -> None:
    assert run_apart(act, tmp_path) == 0
