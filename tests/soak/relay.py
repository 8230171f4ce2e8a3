"""A TCP relay in front of the runtime whose connections can be cut, as a network or a dead client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Relay:
    """Passes bytes on both ways until it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        #: Where clients connect to.
        self.address = ""

    def cut(self) -> None:
        """Resets every connection; neither side hears a word before."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one connection."""
        try:
            theirs, out = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, out]
        for source, sink in ((reader, out), (theirs, writer)):
            task = asyncio.create_task(_pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cuts what is left, and waits until nothing is passed on any more."""
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(64 << 10):
            sink.write(data)
            await sink.drain()
    sink.close()


@asynccontextmanager
async def open_relay(address: str) -> AsyncIterator[Relay]:
    """A relay to `address` (`host:port`), on loopback."""
    host, _, port = address.rpartition(":")
    relay = Relay(host, int(port))
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
