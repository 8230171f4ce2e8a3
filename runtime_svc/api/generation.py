"""`kiln.runtime.v1.GenerationService`: validate, call, convert."""

# ruff: noqa: N802, ARG002 - names and arguments of the methods are gRPC's
from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import grpc
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import generation_pb2_grpc

from edge.access.principal import PRINCIPAL
from edge.interceptor import change_stall_timeout, describe_call
from edge.spans import TRACER, record_span
from edge.surroundings import take_request_id
from runtime_svc.api.embedding import begin_embedding, embed_from_pb, embed_sizes_from_pb, embeddings_to_pb
from runtime_svc.api.generation_wire import call_from_pb, event_to_pb, prompt_from_pb, prompt_size_from_pb
from runtime_svc.captures.directory import CapturingStream
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.events import Finished
from runtime_svc.engine.request import Usage
from runtime_svc.engine.streams import MergedStream, OutputStream

Context = grpc.aio.ServicerContext[Any, Any]

# The engine ends a sequence this long before the call's deadline, so that the terminal event still reaches the client.
DEADLINE_MARGIN_S: Final = 0.05
#: What ended a request if its client did so by a call.
ABORT_CAUSE: Final = "Abort"


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Streams tokens from deployments."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Generates sequences; the call ends with the status that the first terminal event with one names."""
        describe_call(deployment_id=request.deployment_id)
        request_id = take_request_id(context, request.request_id)
        deadline_s = find_deadline(context)
        deployment = self._deployments.get_for_requests(request.deployment_id)
        arrived_ns = time.time_ns()
        convert = partial(call_from_pb, request, request_id=request_id, caller=PRINCIPAL.get())
        call = await deployment.convert([prompt_size_from_pb(request)], request.ByteSize(), convert)
        stream = await deployment.generate(call, deadline_s=deadline_s)
        if stream.stall_timeout_s is not None:
            change_stall_timeout(stream.stall_timeout_s)
        with conclude_stream(stream, arrived_ns):
            async for event in stream:
                yield event_to_pb(event)
        if stream.error is not None:
            raise stream.error

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Turns prompts into vectors."""
        describe_call(deployment_id=request.deployment_id)
        request_id = take_request_id(context, request.request_id)
        arrived_ns, deadline_s = time.time_ns(), find_deadline(context)
        deployment = self._deployments.get_for_requests(request.deployment_id)
        convert = partial(embed_from_pb, request, request_id=request_id, caller=PRINCIPAL.get())
        call = await deployment.convert(embed_sizes_from_pb(request), request.ByteSize(), convert)
        requests, stream = await begin_embedding(deployment, call, deadline_s=deadline_s)
        weight_epoch = 0
        with conclude_stream(stream, arrived_ns):
            async for event in stream:
                weight_epoch = event.weight_epoch
        if stream.error is not None:
            raise stream.error
        return embeddings_to_pb(requests, normalizes=request.normalize, weight_epoch=weight_epoch)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a request; its slot is free when the client gets the answer."""
        describe_call(deployment_id=request.deployment_id)
        engine = self._deployments.get(request.deployment_id).engine
        if engine is not None and abort_request(engine, request.request_id):
            return pb.AbortResponse(outcome=pb.AbortResponse.OUTCOME_ABORTED)
        return pb.AbortResponse(outcome=pb.AbortResponse.OUTCOME_ALREADY_FINISHED)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text or a chat into token ids."""
        describe_call(deployment_id=request.deployment_id)
        deployment = self._deployments.get(request.deployment_id)
        size = prompt_size_from_pb(request)
        prompt = await deployment.convert([size], size.num_bytes, partial(prompt_from_pb, request))
        return pb.TokenizeResponse(token_ids=await deployment.tokenize(prompt))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        describe_call(deployment_id=request.deployment_id)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        deployment = self._deployments.get(request.deployment_id)
        text = await deployment.detokenize(request.token_ids, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)


def abort_request(engine: Engine, request_id: str) -> bool:
    """Ends a request of the call's principal, or with the scope admin of others; False if there is none."""
    principal = PRINCIPAL.get()
    return engine.requests.abort(request_id, ABORT_CAUSE, owner=principal.key, reaches_all=principal.reach is None)


def find_deadline(context: Context) -> float | None:
    """Returns when to end the sequence, in seconds of the event loop's clock; None if the call has no deadline."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return asyncio.get_running_loop().time() + remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 4)


@contextmanager
def conclude_stream(stream: OutputStream | MergedStream | CapturingStream, arrived_ns: int) -> Iterator[None]:
    """Closes a stream when its call ends in any way, and tells log and trace what became of its sequences.

    `arrived_ns` is when the call arrived, in nanoseconds since the epoch.
    """
    try:
        yield
    finally:
        # Here, and not at the terminal event: a client that has left gets none.
        stream.close()
        ends = stream.ends
        if ends:
            describe_call(**_summarize(ends))
        if TRACER.get() is not None:
            for index, end in enumerate(ends):
                _trace(end.usage, arrived_ns, {"kiln.sequence_index": index} if len(ends) > 1 else {})


def _summarize(ends: Sequence[Finished]) -> dict[str, object]:
    """What the log says of a call's sequences: why they ended, their tokens, and the time to the first one of all."""
    usages = [end.usage for end in ends]
    summary: dict[str, object] = {
        "finish_reason": ", ".join(dict.fromkeys(end.finish.reason.name for end in ends)),
        "prompt_tokens": usages[0].prompt_tokens,
        "generated_tokens": sum(usage.generated_tokens for usage in usages),
    }
    if len(ends) > 1:
        summary["sequences"] = len(ends)
    if summary["generated_tokens"]:
        summary["ttft_s"] = round(min(one.queue_s + one.prefill_s for one in usages if one.generated_tokens), 6)
    return summary


def _trace(usage: Usage, arrived_ns: int, which: Mapping[str, int]) -> None:
    """Adds what became of a sequence to the trace of its call: queue, steps of its prompt, steps of its tokens."""
    started_ns = record_span("queue", arrived_ns, usage.queue_s, which)
    steps = Counter[bool]()
    for bucket in usage.buckets:
        steps[bucket.key.submodel == "context_encoding"] += bucket.steps
    attributes = {"kiln.steps": steps[True], "kiln.prompt_tokens": usage.prompt_tokens, **which}
    decoding_ns = record_span("prefill steps", started_ns, usage.prefill_s, attributes)
    attributes = {"kiln.steps": steps[False], "kiln.generated_tokens": usage.generated_tokens, **which}
    record_span("decode steps", decoding_ns, usage.decode_s, attributes)
