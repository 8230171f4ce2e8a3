"""A worker: clients of a served deployment, all in one process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kiln_client import AsyncRuntime

from bench.worker import serve


def stream(address: str, deployment: str, streams: int, context: int, tokens: int) -> float:
    """Streams greedy answers of `tokens` tokens each.

    Returns:
        Seconds of a step of one token for every stream, while all of them stream.
    """
    return asyncio.run(_stream(address, deployment, streams, context, tokens))


async def _stream(address: str, deployment: str, streams: int, context: int, tokens: int) -> float:
    async with AsyncRuntime(address) as runtime:
        stamps = await asyncio.gather(*(_one(runtime, deployment, context, tokens) for _ in range(streams)))
    # Prompts are computed one after the other: what all streams do together begins with the last one's first token.
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    together = sum(1 for times in stamps for at in times if start < at <= end)
    return (end - start) / together * streams


async def _one(runtime: AsyncRuntime, deployment: str, context: int, tokens: int) -> list[float]:
    stamps: list[float] = []
    prompt: Any = list(range(5, 5 + context))
    async with runtime.generate(deployment, prompt, max_new_tokens=tokens, temperature=0.0, ignore_eos=True) as events:
        async for event in events:
            stamps += [time.perf_counter()] * len(event.delta.tokens)
    return stamps


if __name__ == "__main__":
    serve({"stream": stream})
