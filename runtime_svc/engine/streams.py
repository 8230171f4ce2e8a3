"""A request's output on its way to the client: bounded, and exactly one terminal event."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from runtime_svc.engine.events import Event, Finished, Payload


class OutputStream:
    """Events of one request. The engine puts, one consumer iterates.

    `put` never waits: a stream that is full asks the engine to pause the request, so it exceeds its capacity by at most
    the events of the running step, and by the terminal event.
    """

    def __init__(self, capacity: int, *, on_drained: Callable[[], None], on_closed: Callable[[], None]) -> None:
        """Starts empty.

        Args:
            capacity: Events that may wait for the client.
            on_drained: Called when a full stream has room again.
            on_closed: Called when the consumer leaves.
        """
        self._capacity = capacity
        self._on_drained = on_drained
        self._on_closed = on_closed
        self._events: deque[Event] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._next_sequence_number = 0
        #: The terminal event's payload, once there is one; it is here also if the consumer leaves without taking it.
        self.finished: Finished | None = None

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly."""
        return len(self._events) >= self._capacity

    def put(self, payload: Payload, weight_epoch: int) -> None:
        """Appends an event; nothing may follow `Finished`."""
        assert self.finished is None, "an event after the terminal one"
        if isinstance(payload, Finished):
            self.finished = payload
        self._events.append(Event(self._next_sequence_number, weight_epoch, payload))
        self._next_sequence_number += 1
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """The consumer leaves: the request ends unless it has ended. Harmless when repeated."""
        self._on_closed()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.finished is not None:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        was_full = self.is_full
        event = self._events.popleft()
        if was_full and not self.is_full:
            self._on_drained()
        return event
