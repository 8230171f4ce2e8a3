"""A worker: clients of a served deployment, all in one process."""

from __future__ import annotations

import asyncio
from typing import Any

from kiln_client import AsyncRuntime

from bench.meter import Meter
from bench.worker import serve


def stream(
    *, address: str, deployment: str, streams: int, context: int, tokens: int, processes: dict[str, int]
) -> dict[str, Any]:
    """Streams greedy answers of `tokens` tokens each, while all of them stream.

    Args:
        address: `host:port` of the runtime.
        deployment: Id of the deployment.
        streams: Number of them.
        context: Tokens of each prompt.
        tokens: Tokens of each answer.
        processes: Ids of the processes whose time is measured, by a name.

    Returns:
        See `Meter.result`.
    """
    meter = Meter(streams, tokens, processes)
    asyncio.run(_stream(address, deployment, context, tokens, meter))
    return meter.result()


async def _stream(address: str, deployment: str, context: int, tokens: int, meter: Meter) -> None:
    async with AsyncRuntime(address) as runtime:
        await asyncio.gather(*(_one(runtime, deployment, context, tokens, meter) for _ in range(meter.streams)))


async def _one(runtime: AsyncRuntime, deployment: str, context: int, tokens: int, meter: Meter) -> None:
    prompt = list(range(5, 5 + context))
    options = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    counter = meter.open_stream()
    async with runtime.generate(deployment, prompt, **options) as events:
        async for event in events:
            counter.count(len(event.delta.tokens))


if __name__ == "__main__":
    serve({"stream": stream})
