"""Tells watchers what happens to operations."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from compiler_svc.database.operations import Operation
from compiler_svc.errors import TooManyWatchers

#: Changes kept for a slow watcher; it misses the oldest of them, never the end.
_MOST_KEPT: Final = 256
#: Calls that watch one operation, or wait for it, at once.
MOST_WATCHERS: Final = 128
_RETRY_AFTER_S: Final = 5.0


class OperationFeed:
    """Changes of operations, to all who watch them."""

    def __init__(self) -> None:
        """Starts without watchers."""
        self._watchers: defaultdict[str, set[asyncio.Queue[Operation]]] = defaultdict(set)

    def publish(self, operation: Operation) -> None:
        """Tells the operation's watchers what it is like now."""
        for queue in self._watchers.get(operation.operation_id, ()):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(operation)

    @contextmanager
    def watch(self, operation_id: str) -> Iterator[asyncio.Queue[Operation]]:
        """Collects every change of an operation from now on.

        Raises:
            TooManyWatchers: Too many do so already.
        """
        if len(self._watchers.get(operation_id, ())) >= MOST_WATCHERS:
            raise TooManyWatchers(f"operations/{operation_id}", MOST_WATCHERS, _RETRY_AFTER_S)
        queue: asyncio.Queue[Operation] = asyncio.Queue(_MOST_KEPT)
        self._watchers[operation_id].add(queue)
        try:
            yield queue
        finally:
            self._watchers[operation_id].discard(queue)
            if not self._watchers[operation_id]:
                del self._watchers[operation_id]
