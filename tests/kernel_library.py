"""A kernel by itself: as libraries link with it, for one instruction set, and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from bundle.manifest import Target
from compiler_svc.lower.common_objects import compile_once
from compiler_svc.lower.inductor import steered
from compiler_svc.lower.job import LoweringJob, LoweringOptions
from targets.cpu import GXX, X86_64
from tests.lowering_cache import LOWERING_CACHE

#: Compiles, as lowerings do, what their libraries link with.
CompileObjects = Callable[[LoweringJob], Iterable[Path]]

#: For which kernels differ, the newest last.
ISAS: Final = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx")
_SET_THREADS: Final = """#include <omp.h>
extern "C" void set_threads(int threads) { omp_set_num_threads(threads); }
"""


def list_isas(isas: Sequence[str] = ISAS) -> list[Any]:
    """Instruction sets as parameters of a fixture: the newest of this host for the short run, all for the long one."""
    newest = [isa for isa in isas if isa in X86_64.list_supported()][-1:]
    return [pytest.param(isa, marks=[pytest.mark.slow] * (isa not in newest)) for isa in isas]


def load_kernel(isa: str, compile_objects: CompileObjects) -> ctypes.CDLL:
    """Loads a kernel's objects; see `link_kernel`."""
    with TemporaryDirectory() as directory:
        # Once it is loaded, nothing reads its file.
        return ctypes.CDLL(str(link_kernel(Path(directory), isa, compile_objects)))


def link_kernel(directory: Path, isa: str, compile_objects: CompileObjects) -> Path:
    """Links a kernel's objects, which `make setup`, a lowering or an earlier run may have compiled.

    The library has one function more, `set_threads`, by which the caller chooses the number of threads.
    """
    LOWERING_CACHE.mkdir(parents=True, exist_ok=True)
    job = LoweringJob(
        tag="kernel",
        directory=directory,
        cache_dir=LOWERING_CACHE,
        num_state=0,
        constants=(),
        reserved_bytes=0,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa=isa)),
    )
    with steered(job):
        objects = [*compile_objects(job), compile_once(job, "set_threads", _SET_THREADS)]
    path = directory / f"{isa}.so"
    subprocess.run([GXX.find(), "-shared", "-fopenmp", *objects, "-o", path], check=True)
    return path
