"""The stream of a request that captures: its terminal event names the file, so it comes when that is written."""

from __future__ import annotations

import asyncio

import msgspec

from runtime_svc.captures.directory import PendingCapture
from runtime_svc.engine.events import Event, Finished
from runtime_svc.engine.streams import OutputStream


class CapturingStream:
    """An `OutputStream`, with what became of the capture in its terminal event."""

    def __init__(self, stream: OutputStream, pending: PendingCapture) -> None:
        """Reads `stream`; nobody else does."""
        self._stream = stream
        self._pending = pending

    def close(self) -> None:
        """The consumer leaves: the request ends unless it has ended, and what was captured is written all the same."""
        self._stream.close()
        self._pending.write()

    def __aiter__(self) -> CapturingStream:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._stream)
        if not isinstance(event.payload, Finished):
            return event
        # A consumer that leaves meanwhile does not take the file with it.
        outcome = await asyncio.shield(self._pending.write())
        payload = msgspec.structs.replace(
            event.payload,
            captured_inputs_path="" if outcome.path is None else str(outcome.path),
            capture_error=outcome.error,
        )
        return msgspec.structs.replace(event, payload=payload)
