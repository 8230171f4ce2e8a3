"""The event loop of our services: uvloop's where it is installed, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventLoopKind:
    """An implementation of event loops.

    Attributes:
        name: `uvloop` or `asyncio`.
        make: Makes a loop, as a factory of `asyncio.Runner`.
        fallback_reason: Why it is not uvloop's; None if it is.
    """

    name: str
    make: Callable[[], asyncio.AbstractEventLoop]
    fallback_reason: str | None = None


def find_event_loop() -> EventLoopKind:
    """Returns the implementation that services run on here.

    uvloop has no release for some platforms, such as Windows, and may come late for a new Python.

    Services must not start processes through the loop (`asyncio.create_subprocess_exec`): uvloop forks them with the
    handlers that gRPC registers for forks, and some crash before their program begins. `subprocess` does not.
    """
    try:
        import uvloop  # noqa: PLC0415 - the platform may lack it
    except ImportError as error:
        return EventLoopKind("asyncio", asyncio.new_event_loop, str(error))
    return EventLoopKind("uvloop", uvloop.new_event_loop)
