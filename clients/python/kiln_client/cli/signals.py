"""Signals while a command blocks its event loop: at a prompt, or in a library that waits by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeAlias

_Reaction: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers

#: The event loop would react to them when it runs again, which may be never.
_REACTIONS: Final[dict[signal.Signals, _Reaction]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt, and SIGTERM end the process, while the block runs."""
    previous = {number: signal.signal(number, reaction) for number, reaction in _REACTIONS.items()}
    try:
        yield
    finally:
        for number, reaction in previous.items():
            signal.signal(number, reaction)
