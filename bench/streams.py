"""A worker: clients of a served deployment, all in one process."""

from __future__ import annotations

import asyncio

from kiln_client import AsyncRuntime

from bench.meter import Meter
from bench.worker import serve


def stream(*, address: str, deployment: str, streams: int, context: int, tokens: int, front: int) -> dict[str, float]:
    """Streams greedy answers of `tokens` tokens each, while all of them stream.

    Args:
        front: Process id of the runtime's front.

    Returns:
        `step_s`: seconds of a step that gives every stream one token. `front_cpu_s`: the front's processor seconds for
        each token.
    """
    meter = Meter(streams, tokens, {"front": front})
    asyncio.run(_stream(address, deployment, context, tokens, meter))
    return meter.result()


async def _stream(address: str, deployment: str, context: int, tokens: int, meter: Meter) -> None:
    async with AsyncRuntime(address) as runtime:
        await asyncio.gather(*(_one(runtime, deployment, context, tokens, meter) for _ in range(meter.streams)))


async def _one(runtime: AsyncRuntime, deployment: str, context: int, tokens: int, meter: Meter) -> None:
    had = 0
    prompt = list(range(5, 5 + context))
    options = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    async with runtime.generate(deployment, prompt, **options) as events:
        async for event in events:
            meter.count(had, len(event.delta.tokens))
            had += len(event.delta.tokens)


if __name__ == "__main__":
    serve({"stream": stream})
