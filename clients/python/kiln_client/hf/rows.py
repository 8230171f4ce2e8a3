"""The tokens of several sequences, in step, as a model of transformers gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

from kiln.runtime.v1.generation_pb2 import Token

from kiln_client.blocking import loop_thread
from kiln_client.errors import StreamIncomplete
from kiln_client.runtime import AsyncRuntime

_Item: TypeAlias = Token | BaseException | None


class TokenRows:
    """Asks for the sequences of some prompts, and gives the next token of each, until they are ended or left.

    Every stream is read as fast as it comes, so that a row that is behind stops no other.
    """

    def __init__(
        self,
        runtime: AsyncRuntime,
        deployment_id: str,
        prompts: Sequence[Sequence[int]],
        options: Sequence[Mapping[str, Any]],
        *,
        num_sequences: int = 1,
        max_streams: int,
    ) -> None:
        """Prepares the calls.

        Args:
            runtime: A client that is used on the loop of the blocking clients.
            deployment_id: Deployment to use.
            prompts: Token ids of each prompt. Row i is sequence i % num_sequences of prompt i // num_sequences.
            options: Of the request for each prompt.
            num_sequences: Sequences of each prompt.
            max_streams: Calls that run at once; the others wait.
        """
        self._runtime, self._deployment_id = runtime, deployment_id
        self._calls = [*zip(prompts, options, strict=True)]
        self._num_sequences = num_sequences
        self._queues: list[asyncio.Queue[_Item]] = [asyncio.Queue() for _ in range(len(prompts) * num_sequences)]
        self._left: set[int] = set()
        self._turns = asyncio.Semaphore(max_streams)
        self._tasks: list[asyncio.Task[None]] = []

    def next(self, rows: Sequence[int]) -> list[Token | None]:
        """Waits for the next token of some rows; None for a row that has ended.

        Raises:
            KilnError: The request of one of them has failed.
        """
        return loop_thread.run(self._next(rows))

    def leave(self, rows: Sequence[int]) -> None:
        """Reads no more of some rows. A call ends when all its rows are left."""
        self._left.update(rows)
        calls = {row // self._num_sequences for row in rows}
        ended = [call for call in calls if self._left.issuperset(self._rows_of(call))]
        if ended:
            loop_thread.run(self._end(ended))

    def __enter__(self) -> Self:
        loop_thread.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop_thread.run(self._end(range(len(self._tasks))))

    def _rows_of(self, call: int) -> range:
        return range(call * self._num_sequences, (call + 1) * self._num_sequences)

    async def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._read(call)) for call in range(len(self._calls))]
        for call, task in enumerate(self._tasks):
            task.add_done_callback(partial(self._note_failure, call))

    async def _end(self, calls: Sequence[int]) -> None:
        tasks = [self._tasks[call] for call in calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, rows: Sequence[int]) -> list[Token | None]:
        tokens: list[Token | None] = []
        for row in rows:
            item = await self._queues[row].get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._queues[row].put_nowait(None)
            tokens.append(item)
        return tokens

    async def _read(self, call: int) -> None:
        """Reads one call to its end."""
        queues = [self._queues[row] for row in self._rows_of(call)]
        prompt, options = self._calls[call]
        unfinished = {*range(self._num_sequences)}
        async with (
            self._turns,
            self._runtime.generate(self._deployment_id, prompt, num_sequences=self._num_sequences, **options) as events,
        ):
            async for event in events:
                queue = queues[event.sequence_index]
                for token in event.delta.tokens:
                    queue.put_nowait(token)
                if event.HasField("finished"):
                    unfinished.discard(event.sequence_index)
                    queue.put_nowait(None)
        if unfinished:
            raise StreamIncomplete("no finished event")

    def _note_failure(self, call: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            for row in self._rows_of(call):
                self._queues[row].put_nowait(error)
