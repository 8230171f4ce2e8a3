"""A kernel by itself: compiled for one instruction set, and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import pytest

from targets.cpu import GXX, X86_64
from tests.lowering_cache import LOWERING_CACHE

#: For which kernels differ, the newest last.
ISAS: Final = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx")
_FLAGS: Final = ("-std=c++20", "-O3", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=off")
_SET_THREADS: Final = 'extern "C" void set_threads(int threads) { omp_set_num_threads(threads); }\n'


def list_isas(isas: Sequence[str] = ISAS) -> list[Any]:
    """Instruction sets as parameters of a fixture: the newest of this host for the short run, all for the long one."""
    newest = [isa for isa in isas if isa in X86_64.list_supported()][-1:]
    return [pytest.param(isa, marks=[pytest.mark.slow] * (isa not in newest)) for isa in isas]


def load_kernel(name: str, source: str, isa: str) -> ctypes.CDLL:
    """Compiles a kernel's source, once for all runs and again after an edit, and loads it.

    It has one function more, `set_threads`, by which the caller chooses the number of threads.
    """
    text, flags = source + _SET_THREADS, [*_FLAGS, *X86_64[isa].compiler_options]
    path = LOWERING_CACHE / f"{name}-{sha256(' '.join([*flags, text]).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        subprocess.run([GXX.find(), *flags, "-x", "c++", "-", "-o", new], input=text, text=True, check=True)
        new.replace(path)
    return ctypes.CDLL(str(path))
