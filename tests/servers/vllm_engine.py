"""A client of vLLM's engine API, with the stubs that routers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from tests.servers.runtime import Runtime


def stub_of(served: Runtime) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def make_request(
    prompt: Sequence[int], *, stream: bool = True, request_id: str = "", max_tokens: int | None = 5, **params: Any
) -> pb.GenerateRequest:
    """A request as SMG writes them: it fills in the neutral values."""
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "skip_special_tokens": True}
    sampling = pb.SamplingParams(max_tokens=max_tokens, **(neutral | {"ignore_eos": True} | params))
    tokenized = pb.TokenizedInput(original_text="not read", input_ids=prompt)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=sampling, stream=stream)


async def call(served: Runtime, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub_of(served).Generate(request)]


async def complete(served: Runtime, prompt: Sequence[int], **options: Any) -> pb.GenerateComplete:
    """The only message of a call that does not stream."""
    (only,) = await call(served, make_request(prompt, stream=False, **options))
    return only.complete
