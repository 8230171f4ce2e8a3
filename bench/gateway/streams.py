"""A worker: clients that stream greedy answers by one of the ways to a deployment, all in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc
import httpx2
from kiln_client import AsyncRuntime
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from bench.gateway.chats import time_chats
from bench.meter import Meter
from bench.services import DEPLOYMENT
from bench.worker import serve

#: Yields the number of new tokens of each message.
Stream = Callable[[str, str, int], AsyncGenerator[int, None]]


async def _stream_service(address: str, prompt: str, tokens: int) -> AsyncGenerator[int, None]:
    options = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    async with AsyncRuntime(address) as runtime, runtime.generate(DEPLOYMENT, prompt, **options) as events:
        async for event in events:
            yield len(event.delta.tokens)


async def _stream_engine(address: str, prompt: str, tokens: int) -> AsyncGenerator[int, None]:
    params = pb.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    request = pb.GenerateRequest(text=prompt, sampling_params=params, stream=True)
    async with grpc.aio.insecure_channel(address) as channel:
        async for response in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request):
            yield len(response.chunk.token_ids)


async def _stream_gateway(address: str, prompt: str, tokens: int) -> AsyncGenerator[int, None]:
    """Reads server-sent events. A chunk counts as one token; the usage at the end tells whether that was right."""
    body = {"model": DEPLOYMENT, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = 0
    async with (
        httpx2.AsyncClient(timeout=300, trust_env=False) as client,
        client.stream("POST", f"{address}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if any(choice["text"] for choice in chunk["choices"]):
                chunks += 1
                yield 1
            elif chunk.get("usage") and chunk["usage"]["completion_tokens"] != chunks:
                raise ValueError(f"{chunks} chunks with text for {chunk['usage']['completion_tokens']} tokens")


_STREAMS: Final[Mapping[str, Stream]] = {
    "service": _stream_service,
    "engine": _stream_engine,
    "gateway": _stream_gateway,
}


def stream(
    *, way: str, address: str, prompt: str, streams: int, tokens: int, processes: dict[str, int]
) -> dict[str, Any]:
    """Streams answers of `tokens` tokens each, while all of them stream.

    Args:
        way: `service`, `engine` or `gateway`.
        address: `host:port` of the runtime, or the gateway's URL.
        processes: Ids of the processes whose time is measured, by a name.

    Returns:
        See `Meter.result`.
    """
    meter = Meter(streams, tokens, processes)

    async def one() -> None:
        counter = meter.open_stream()
        async with aclosing(_STREAMS[way](address, prompt, tokens)) as counts:
            async for count in counts:
                counter.count(count)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(streams)))

    asyncio.run(all_of_them())
    return meter.result()


if __name__ == "__main__":
    serve({"stream": stream, "time_chats": time_chats})
