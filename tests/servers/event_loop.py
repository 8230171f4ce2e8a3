"""Tests of services run on the event loop that services run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from edge.event_loop import find_event_loop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The hook of pytest-asyncio; a conftest that imports it has its folder's tests run on this loop."""
    kind = find_event_loop()
    return {kind.name: kind.make}
