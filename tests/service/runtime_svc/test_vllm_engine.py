"""vLLM's engine API over loopback, by the stubs that routers have, beside GenerationService."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, tokens_of


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


async def test_a_stream_has_the_tokens_of_generation_service(served: Runtime) -> None:
    await served.deploy()
    theirs = tokens_of(await served.generate([5, 6], 7, temperature=0.5, seed=11))
    *chunks, last = await call(served, make_request([5, 6], max_tokens=7, temperature=0.5, seed=11))
    assert [list(one.chunk.token_ids) for one in chunks] == [[token] for token in theirs]
    assert {(one.chunk.prompt_tokens, one.chunk.completion_tokens) for one in chunks} == {(2, 1)}
    complete = last.complete
    assert list(complete.output_ids) == theirs == expected_tokens([5, 6], 7, seed=11)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 2, 7)
    assert (complete.cached_tokens, complete.index, complete.WhichOneof("matched_stop")) == (0, 0, None)


async def test_without_stream_one_message_has_everything(served: Runtime) -> None:
    await served.deploy()
    (only,) = await call(served, make_request([5, 6], stream=False))
    assert list(only.complete.output_ids) == expected_tokens([5, 6], 5)
