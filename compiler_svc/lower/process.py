"""The lowering process, from its fork to its end. A named error is an answer; so are class and message of any other
error, whose traceback goes to the job's log.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pkgutil import resolve_name
from typing import Final

from bundle.errors import KilnError
from compiler_svc.errors import shorten
from compiler_svc.lower.errors import LoweringFailed
from compiler_svc.lower.job import LoweredExecutable, LoweringBackend, LoweringJob
from execution.forkserver.parent_death import end_tree_with_parent
from execution.forkserver.task import decode, serve_order
from targets.registry import TARGETS

_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"


def preload() -> None:
    """Does once what each lowering would begin with: imports modules, besides those of this module."""
    for name in _list_needed():
        prepared = resolve_name(name)
        if callable(prepared):
            prepared()


def _list_needed() -> Iterator[str]:
    """Lists the modules of the lowering backends, and what these name besides."""
    for lowering in chain.from_iterable(target.lowerings for target in TARGETS.values()):
        if lowering.backend is None or lowering.in_process:
            continue
        module = lowering.backend.partition(":")[0]
        # A host may lack the distribution of a backend. Then it compiles nothing for the backend's target.
        if find_spec(module.partition(".")[0]) is not None:
            yield from (module, *lowering.preloaded)


def run_job(order_fd: int, answer_fd: int) -> None:
    """Runs the job of an order."""
    # Not this process alone: the C++ compiler would go on.
    end_tree_with_parent(os.getppid())
    serve_order(order_fd, answer_fd, _lower)


def _lower(order: bytes) -> LoweredExecutable:
    job = decode(order, LoweringJob)
    _settle(job)
    # Resolved here, because `preload` first sets the directory in which Inductor makes its cache.
    backend: LoweringBackend = resolve_name(str(job.options.lowering.backend))
    try:
        return backend(job)
    except KilnError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise LoweringFailed(job.tag, shorten(error)) from error


def _settle(job: LoweringJob) -> None:
    """Directs everything that the process writes into the job's directory."""
    own = job.directory / "inductor"
    own.mkdir(exist_ok=True)
    os.environ |= {
        _CACHE_VARIABLE: str(own),
        "TMPDIR": str(own),
        # Lowering runs g++ and Python; more threads would only slow the other processes down.
        "OMP_NUM_THREADS": "1",
    }
    # Makes tempfile read the new environment.
    tempfile.tempdir = None
