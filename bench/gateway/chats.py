"""A worker: clients whose chats begin at once, by GenerationService and by SMG; how long until the last has ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import httpx2
from kiln_client import AsyncRuntime, chat

from bench.services import DEPLOYMENT
from bench.worker import serve

#: How many begin at once.
CROWDS: Final = (16, 64, 128)
#: Tokens of each answer.
TOKENS: Final = 32
#: Rows of the deployment's KV cache; the other chats wait.
ROWS: Final = 16
CONFIG: Final = {
    "neuron_config": {
        "seq_len": 128,
        "batch_size": ROWS,
        "ctx_batch_size": 1,
        "torch_dtype": "float32",
        "is_continuous_batching": True,
        "on_device_sampling_config": {"dynamic": True},
    }
}

Ask = Callable[[int], Awaitable[int]]


def _messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell story {number}"}]


async def _time_all(ask: Ask, chats: int) -> float:
    began = time.perf_counter()
    tokens = await asyncio.gather(*map(ask, range(chats)))
    duration_s = time.perf_counter() - began
    if set(tokens) != {TOKENS}:
        raise ValueError(f"answers of {sorted(set(tokens))} tokens, not {TOKENS}")
    return duration_s


async def _by_service(address: str, chats: int) -> float:
    """gRPC streams every answer, also one that the client takes whole."""
    async with AsyncRuntime(address) as runtime:

        async def ask(number: int) -> int:
            options = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            answer = await runtime.complete(DEPLOYMENT, chat(_messages(number)), **options)
            return answer.usage.generated_tokens

        return await _time_all(ask, chats)


async def _by_gateway(url: str, chats: int, *, is_stream: bool) -> float:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:

        async def ask(number: int) -> int:
            body: dict[str, Any] = {"model": DEPLOYMENT, "messages": _messages(number), "max_tokens": TOKENS}
            body |= {"temperature": 0, "ignore_eos": True}
            if not is_stream:
                response = await client.post(f"{url}/v1/chat/completions", json=body)
                response.raise_for_status()
                return int(response.json()["usage"]["completion_tokens"])
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            tokens = 0
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                        tokens = usage["completion_tokens"]
            return tokens

        return await _time_all(ask, chats)


def time_chats(*, runtime: str, gateway: str, chats: int) -> Mapping[str, float]:
    """Seconds until the last of so many chats has ended, by each way in turn: `service`; SMG's `whole` and `stream`."""

    async def run() -> dict[str, float]:
        return {
            "service": await _by_service(runtime, chats),
            "whole": await _by_gateway(gateway, chats, is_stream=False),
            "stream": await _by_gateway(gateway, chats, is_stream=True),
        }

    return asyncio.run(run())


if __name__ == "__main__":
    serve({"time_chats": time_chats})
