"""Which of the loops that Inductor writes threads divide among each other."""

from __future__ import annotations

from typing import Any, Final

from torch._inductor.codegen.cpp import CppKernel, ParallelDepth

from compiler_svc.lower.limited_loop import LimitedLoop

#: Elements below which one thread computes a loop alone. It reads 64 KB of floats in about the time in which two
#: threads begin and end a parallel region, if they need not be woken for it. Sums over fewer elements do not depend on
#: threads.
MIN_PARALLEL_ELEMENTS: Final = 16384
#: Threads that Inductor plans with. By default it would take the number of this host's processors, and the code would
#: depend on the host. It runs with any number. One thread would let it write code that all threads run at once.
PLANNED_THREADS: Final = 2


def decide_parallel_depth(kernel: CppKernel, deepest: ParallelDepth, threads: int) -> ParallelDepth:
    """Replaces `CppKernel.decide_parallel_depth`: how many loops threads divide, from the outermost that they may.

    Args:
        deepest: The loops that they may divide.
        threads: `PLANNED_THREADS`.
    """
    if kernel.size_hint() < MIN_PARALLEL_ELEMENTS:
        return ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
    chosen = _DECIDE(kernel, deepest, threads)
    loops: Any = getattr(getattr(kernel, "loop_nest", None), "loops", None) or ()
    # OpenMP does not divide two loops as one if the bound of the inner one depends on the outer one.
    inner = loops[chosen.start_depth + 1 : chosen.start_depth + chosen.parallel_depth]
    if any(isinstance(loop, LimitedLoop) for loop in inner):
        return ParallelDepth(parallel_depth=1, start_depth=chosen.start_depth)
    return chosen


_DECIDE: Final = CppKernel.decide_parallel_depth
