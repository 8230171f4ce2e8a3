"""Streams among which a prompt arrives, and how long each of their tokens is behind the one before."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from kiln_client import AsyncRuntime

from bench.prompts import answer_greedily, find_first, make_prompt


def crowd(
    *, address: str, deployment: str, streams: int, context: int, steps: int, prompt: int, max_tokens: int
) -> dict[str, Any]:
    """Streams greedy answers, and sends a prompt while they run.

    Args:
        context: Tokens of the prompt of each.
        steps: Tokens that each stream has at least before the prompt is sent.
        prompt: Tokens of the prompt.
        max_tokens: Tokens that a stream may have at most.

    Returns:
        `calm`, `crowded`: seconds between two tokens of a stream, which ended before the prompt was sent, and which
        ended between then and its first token. `first_s`: seconds until its first token.
    """
    measuring = _Crowd(deployment, streams, context, max_tokens)
    return asyncio.run(measuring.run(address, steps, prompt))


class _Crowd:
    """Streams, and the moments at which each had tokens."""

    def __init__(self, deployment: str, streams: int, context: int, max_tokens: int) -> None:
        self._deployment = deployment
        self._context = context
        self._max_tokens = max_tokens
        self._moments: list[list[float]] = [[] for _ in range(streams)]
        self._changed = asyncio.Event()

    async def run(self, address: str, steps: int, prompt: int) -> dict[str, Any]:
        try:
            async with AsyncRuntime(address) as runtime, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._stream(runtime, its)) for its in self._moments]
                await self._wait(lambda its: len(its) >= steps)
                sent = time.perf_counter()
                first_s, _ = await find_first(runtime, self._deployment, make_prompt(prompt))
                answered = sent + first_s
                # The gap that the end of the prompt made ends behind the prompt's own token.
                await self._wait(lambda its: its[-1] > answered)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            # A group's own words say nothing, and streams that end too early fail alike.
            raise failures.exceptions[0] from None
        began = max(its[0] for its in self._moments)
        pairs = [pair for its in self._moments for pair in itertools.pairwise(its)]
        return {
            "calm": [end - begin for begin, end in pairs if began <= begin and end <= sent],
            "crowded": [end - begin for begin, end in pairs if sent < end and begin < answered],
            "first_s": first_s,
        }

    async def _stream(self, runtime: AsyncRuntime, moments: list[float]) -> None:
        prompt = make_prompt(self._context)
        async with runtime.generate(self._deployment, prompt, **answer_greedily(self._max_tokens)) as events:
            async for event in events:
                if event.delta.tokens:
                    moments.append(time.perf_counter())
                    self._changed.set()
        raise ValueError(f"a stream ended within {self._max_tokens} tokens, before the prompt had its first one")

    async def _wait(self, is_done: Callable[[list[float]], bool]) -> None:
        while not all(map(is_done, self._moments)):
            self._changed.clear()
            await self._changed.wait()
