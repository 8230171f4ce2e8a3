"""The planning process: does one piece of planning work, leaves the answer, and ends. Order and answer are pickles:
both ends are processes of one service with the same rights.
"""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any, Final

import structlog

from bundle.errors import KilnError
from bundle.host.shortage import name_shortage
from compiler_svc.errors import shorten
from compiler_svc.models.registry import list_families
from compiler_svc.planning.errors import PlanFailed, PlanMemoryExceeded
from compiler_svc.remote.errors import OutlineMissing
from edge.logs import configure_logging
from execution.forkserver.task import serve_order

#: What plans import on use: safetensors takes numpy to read headers.
_LOADED: Final = ("compiler_svc.planning.planner", "compiler_svc.planning.shard_admission", "numpy")


def preload() -> None:
    """Imports the modules that planning needs, and the families of other distributions."""
    for module in _LOADED:
        import_module(module)
    list_families()


def preload_fetching() -> None:
    """Imports the modules that fetches need."""
    import_module("compiler_svc.remote.fetching")


def run_order(max_memory_bytes: int, order_fd: int, answer_fd: int) -> None:
    """Does the work of an order, a callable. `max_memory_bytes` is what the process has been confined to."""
    configure_logging("compiler-plan")

    def explain(error: BaseException) -> KilnError:
        if isinstance(error, MemoryError):
            return PlanMemoryExceeded(max_memory_bytes)
        if isinstance(error, Exception) and (shortage := name_shortage(error)) is not None:
            return shortage
        structlog.get_logger("compiler").error("planning failed", exc_info=error)
        return PlanFailed(shorten(error))

    serve_order(order_fd, answer_fd, _do, write=pickle.dumps, explain=explain)


def _do(order: bytes) -> Any:
    try:
        return pickle.loads(order)()
    except OutlineMissing as missing:
        return missing
