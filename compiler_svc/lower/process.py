"""What a lowering process does once it has been forked.

Runs the job of a directory and leaves its outcome there. A named error is an outcome; anything else ends the process
with a traceback in the job's log.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import tempfile
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Final

from bundle.errors import KilnError
from compiler_svc.lower.job import LoweringBackend, LoweringJob, read_job, write_outcome
from execution.failure import Failure
from execution.forkserver.parent_death import die_with_parent

#: What a lowering imports sooner or later, beside its own code; most of it where Inductor needs it first.
_LOADED: Final = (
    "compiler_svc.lower.aoti",
    "setuptools",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
)
_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"


def preload() -> None:
    """Imports what lowerings need."""
    with tempfile.TemporaryDirectory() as directory:
        # Inductor makes its cache directory when it is imported; each lowering has one of its own.
        os.environ[_CACHE_VARIABLE] = directory
        for module in _LOADED:
            import_module(module)
    del os.environ[_CACHE_VARIABLE]


def run_job(path: str, memory_limit_bytes: int | None) -> None:
    """Runs the job of a directory.

    Args:
        path: The directory.
        memory_limit_bytes: Of data, beside what the job reserves; of this process and of each one that it starts.
    """
    signal.signal(signal.SIGTERM, _end_process_group)
    # Instead of SIGKILL, after which the C++ compiler would go on.
    die_with_parent(signal.SIGTERM, os.getppid())
    job = read_job(Path(path))
    _settle(job)
    if memory_limit_bytes is not None:
        _limit_memory(memory_limit_bytes + job.reserved_bytes)
    # Resolved here: `preload` first says in which directory Inductor shall make its cache.
    backend: LoweringBackend = resolve_name(str(job.options.lowering.backend))
    try:
        write_outcome(job, backend(job))
    except KilnError as error:
        write_outcome(job, Failure.of(error))


def _settle(job: LoweringJob) -> None:
    """Makes the job's directory the place of all that is written."""
    own = job.directory / "inductor"
    own.mkdir(exist_ok=True)
    os.environ |= {
        _CACHE_VARIABLE: str(own),
        "TMPDIR": str(own),
        # Lowering is g++ and Python; more threads would only get into the way of the other processes.
        "OMP_NUM_THREADS": "1",
    }
    # Found anew from the environment.
    tempfile.tempdir = None


def _limit_memory(limit_bytes: int) -> None:
    """Limits data memory.

    Raises:
        MemoryError: The process, with all that it was forked with, has more already.
    """
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is not None and 1024 * int(found[1]) > limit_bytes:
        raise MemoryError(f"{found[1]} kB of data before anything was lowered")
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _end_process_group(_signal: int, _frame: FrameType | None) -> None:
    """Ends the C++ compiler, too, which would otherwise go on."""
    os.killpg(0, signal.SIGKILL)
