"""The planning process: does one piece of planning work, leaves the answer, and ends.

Order and answer are pickles in files without a name. Both ends are processes of one service with the same rights.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import structlog

from bundle.errors import KilnError
from bundle.shortage import name_shortage
from compiler_svc.models.registry import list_families
from compiler_svc.planning.errors import PlanFailed, PlanMemoryExceeded
from compiler_svc.remote.errors import OutlineMissing
from edge.logs import configure_logging
from execution.failure import Failure

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
    """Does the work of an order, and writes its result or its named error.

    Args:
        max_memory_bytes: Data memory that the process may have, for the error: an allocation beyond it fails.
        order_fd: File with the work, a callable.
        answer_fd: File for the answer.
    """
    configure_logging("compiler-plan")
    with os.fdopen(order_fd, "rb") as order, os.fdopen(answer_fd, "wb") as answer:
        pickle.dump(_answer(pickle.load(order), max_memory_bytes), answer)


def _answer(work: Callable[[], Any], max_memory_bytes: int) -> Any:
    try:
        return work()
    except OutlineMissing as missing:
        return missing
    except KilnError as error:
        return Failure.of(error)
    except MemoryError:
        return Failure.of(PlanMemoryExceeded(max_memory_bytes))
    except Exception as error:  # noqa: BLE001 - the last line before the service
        if (shortage := name_shortage(error)) is not None:
            return Failure.of(shortage)
        structlog.get_logger("compiler").exception("planning failed")
        return Failure.of(PlanFailed("an internal error, which the compiler's log describes"))
