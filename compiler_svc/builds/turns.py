"""Turns of builds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BuildTurns:
    """Lets a limited number of builds run at once."""

    def __init__(self, max_builds: int) -> None:
        """Starts with every place free."""
        self._places = asyncio.Semaphore(max_builds)

    @property
    def are_taken(self) -> bool:
        """Whether a build that begins now has to wait."""
        return self._places.locked()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it as long as the context lasts."""
        async with self._places:
            yield
