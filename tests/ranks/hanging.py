"""Ranks whose steps never return, as with a broken driver: what their forkserver loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, Final, Literal

from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call

Hang = Literal["computing", "sleeping"]


def compute(*_: Any) -> None:
    while True:
        pass


def sleep(*_: Any) -> None:
    time.sleep(3600)


WAYS: Final[dict[Hang, Callable[..., None]]] = {"computing": compute, "sleeping": sleep}


def preload(executable_format: str, hang: Hang) -> None:
    from execution.ranks import process  # noqa: PLC0415 - loads torch, which only the forkserver may
    from execution.ranks.rank import Rank  # noqa: PLC0415

    process.preload(executable_format)
    Rank._run_step = WAYS[hang]  # type: ignore[assignment, method-assign]


def hanging_forkserver(executable_format: str, hang: Hang) -> AbstractContextManager[Forkserver]:
    """A forkserver of ranks that load and warm up, and whose steps hang."""
    return closing(Forkserver("kiln-forkserver", Call("tests.ranks.hanging:preload", (executable_format, hang))))
