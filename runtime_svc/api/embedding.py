"""Embed: its messages, and how its prompts are queued as the sequences of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kiln.runtime.v1 import generation_pb2 as pb

from edge.access.principal import ANONYMOUS, Principal
from execution.text.prompt import PromptSize, prompt_size
from runtime_svc.admission.embeds import EmbedCall, admit_embed, check_embed, naming_input
from runtime_svc.api.generation_wire import prompt_from_pb, prompt_size_from_pb
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.engine.prompt_reports import POOLINGS, Pooling, PromptEmbedding, normalize
from runtime_svc.engine.request import Request
from runtime_svc.engine.streams import MergedStream, OutputStream

_POOLINGS: Final[dict[int, Pooling]] = {
    pb.POOLING_UNSPECIFIED: "last",
    **{pb.Pooling.Value(f"POOLING_{name.upper()}"): name for name in POOLINGS},
}


def embed_sizes_from_pb(request: pb.EmbedRequest) -> Iterator[PromptSize]:
    """Measures each prompt without a look at its ids."""
    for index, one in enumerate(request.inputs):
        size = prompt_size_from_pb(one)
        yield replace(size, field=f"inputs[{index}].{size.field}")


def embed_from_pb(request: pb.EmbedRequest, *, request_id: str, caller: Principal = ANONYMOUS) -> EmbedCall:
    """Converts an Embed request."""
    return EmbedCall(
        request_id=request_id,
        prompts=tuple(map(prompt_from_pb, request.inputs)),
        caller=caller.key,
        pooling=_POOLINGS.get(request.pooling, request.pooling),
        adapter=request.adapter,
        cache_salt=request.cache_salt,
    )


def embeddings_to_pb(requests: Sequence[Request], *, normalizes: bool, weight_epoch: int) -> pb.EmbedResponse:
    """Converts what requests have gathered, which have all ended well."""
    response = pb.EmbedResponse(request_id=requests[0].request_id, weight_epoch=weight_epoch)
    for request in requests:
        response.embeddings.add(
            values=read_embedding(request, normalizes=normalizes),
            prompt_tokens=len(request.prompt_token_ids),
            cached_prompt_tokens=request.num_cached_tokens,
        )
    return response


def read_embedding(request: Request, *, normalizes: bool) -> Sequence[float]:
    """The vector of a request that has ended well."""
    assert isinstance(request.report, PromptEmbedding), "admission has asked for it"
    return normalize(request.report.values) if normalizes else request.report.values


async def begin_embedding(
    deployment: Deployment, call: EmbedCall, *, deadline_s: float | None
) -> tuple[Sequence[Request], OutputStream | MergedStream]:
    """Checks, tokenizes and queues the prompts of a call, all or none.

    Returns their requests, whose reports have the embeddings when the stream has ended without an error. They end at
    `deadline_s`, in seconds of the event loop's clock; None for no deadline.
    """
    serving = deployment.require_serving()
    size = sum(prompt_size(prompt) for prompt in call.prompts if prompt is not None)
    await serving.workers.run_if_large(size, check_embed, call, serving.capabilities)
    now_s = asyncio.get_running_loop().time()
    token_ids = []
    for index, prompt in enumerate(call.prompts):
        assert prompt is not None, "the call is checked"
        with naming_input(index):
            token_ids.append(await deployment.encode(prompt))
    requests = admit_embed(call, token_ids, serving.capabilities, now_s=now_s)
    await serving.open_adapter(call.caller, call.adapter)
    # The deployment may have changed state while threads worked.
    serving = deployment.require_serving()
    adapter = deployment.find_adapter(call.caller, call.adapter, serving.engine)
    for request in requests:
        request.adapter = adapter
    texts = [serving.text.sequence_text(()) for _ in requests]
    return requests, serving.engine.submit(requests, texts, deadline_s=deadline_s)
