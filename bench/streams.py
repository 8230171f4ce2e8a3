"""A worker: clients of a served deployment, all in one process."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from kiln_client import AsyncRuntime
from kiln_client.prompts import GenerateOptions

from bench.crowd import crowd
from bench.meter import Meter
from bench.prompts import answer_greedily, find_first, make_prompt
from bench.worker import serve


def stream(
    *,
    address: str,
    deployment: str,
    streams: int,
    context: int,
    tokens: int,
    processes: dict[str, int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Streams answers of `tokens` tokens each to prompts of `context` tokens, while all of them stream.

    They are greedy unless `options` of the requests say otherwise. `processes` are the ids of those whose time is
    measured, by a name; `Meter.result` has this one as `client`.
    """
    meter = Meter(streams, tokens, processes | {"client": os.getpid()})
    asyncio.run(_stream(address, deployment, make_prompt(context), answer_greedily(tokens) | options, meter))
    return meter.result()


def prompts(*, address: str, deployment: str, tokens: int, prompts: int, options: dict[str, Any]) -> list[float]:
    """Sends prompts of `tokens` tokens, one after the other; seconds until the first token of each but the first."""
    return asyncio.run(_prompts(address, deployment, make_prompt(tokens), prompts, options))


def prefixes(
    *, address: str, deployment: str, shared: int, own: int, prompts: int, is_cached: bool
) -> dict[str, list[float]]:
    """Sends prompts that begin alike, one after the other, each for one token.

    They begin with `shared` tokens and have `own` ones behind. If `is_cached`, they may use what an earlier one left.
    `firsts` has the seconds until the first token of each, `cached` the tokens that the runtime took from its cache.
    """
    return asyncio.run(_prefixes(address, deployment, (shared, own), prompts, is_cached=is_cached))


async def _stream(address: str, deployment: str, prompt: list[int], options: GenerateOptions, meter: Meter) -> None:
    async with AsyncRuntime(address) as runtime:
        await asyncio.gather(*(_one(runtime, deployment, prompt, options, meter) for _ in range(meter.streams)))


async def _one(
    runtime: AsyncRuntime, deployment: str, prompt: list[int], options: GenerateOptions, meter: Meter
) -> None:
    counter = meter.open_stream()
    async with runtime.generate(deployment, prompt, **options) as events:
        async for event in events:
            counter.count(len(event.delta.tokens))


async def _prompts(
    address: str, deployment: str, prompt: list[int], count: int, options: dict[str, Any]
) -> list[float]:
    async with AsyncRuntime(address) as runtime:
        firsts = [await find_first(runtime, deployment, prompt, **options) for _ in range(1 + count)]
        return [first_s for first_s, _ in firsts[1:]]


async def _prefixes(
    address: str, deployment: str, tokens: tuple[int, int], prompts: int, *, is_cached: bool
) -> dict[str, list[float]]:
    shared, own = tokens
    async with AsyncRuntime(address) as runtime:
        # With a cache, one prompt more goes ahead and leaves the beginning for the others.
        measured, num_ahead = [], 1 if is_cached else 0
        # Blocks are found under their own salt alone, so nothing is left of an earlier call.
        salt = str(time.time_ns())
        for number in range(num_ahead + prompts):
            prompt = [*make_prompt(shared), *(100 + (number + position) % 500 for position in range(own))]
            its_salt = salt if is_cached else f"{salt} {number}"
            measured.append(await find_first(runtime, deployment, prompt, cache_salt=its_salt))
        counted = measured[num_ahead:]
        return {"firsts": [one[0] for one in counted], "cached": [float(one[1]) for one in counted]}


if __name__ == "__main__":
    serve({"stream": stream, "crowd": crowd, "prefixes": prefixes, "prompts": prompts})
