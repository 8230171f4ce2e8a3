"""Calls about adapters, and bundles of adapters that fake ranks compute with."""

from __future__ import annotations

from typing import Any, Final

from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.fakes import BIAS, VOCAB_SIZE, expected_tokens
from tests.servers.runtime import Metadata, Runtime, token_request, tokens_of

PROMPT: Final = [5, 6, 7, 8, 9]
#: Options of a bundle with two slots.
BASE: Final[dict[str, Any]] = {"num_adapter_slots": 2, "flags": (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)}
#: The adapter that such a bundle has itself.
HOUSE: Final = {"house": 100}


def publish_adapter(served: Runtime, ref: str, number: int, **options: Any) -> str:
    """Publishes a bundle of an adapter alone, which is called `pirate` there."""
    return served.publish(
        ref, has_executables=False, has_weights=False, adapters={"pirate": number}, **{**BASE, **options}
    )


def with_adapter(name: str, **options: Any) -> generation.GenerateRequest:
    request = token_request(PROMPT)
    request.MergeFrom(generation.GenerateRequest(adapter=name, **options))
    return request


async def ask_with(served: Runtime, name: str, metadata: Metadata = (), **options: Any) -> int:
    """Generates with an adapter, and returns the number that it adds to the bias of the weights."""
    tokens = tokens_of(await served.ask(with_adapter(name, **options), metadata))
    number = (tokens[0] - expected_tokens(PROMPT, 1, bias=0)[0]) % VOCAB_SIZE - BIAS
    assert tokens == expected_tokens(PROMPT, 5, bias=BIAS + number)
    return number


async def load_adapter(served: Runtime, ref: str, metadata: Metadata = (), **options: Any) -> pb.Adapter:
    request = pb.LoadAdapterRequest(deployment_id="d", ref=ref, **options)
    return (await served.control.LoadAdapter(request, metadata=metadata)).adapter


async def unload_adapter(served: Runtime, name: str, metadata: Metadata = ()) -> int:
    request = pb.UnloadAdapterRequest(deployment_id="d", name=name)
    return (await served.control.UnloadAdapter(request, metadata=metadata)).active_requests


async def list_adapters(served: Runtime, metadata: Metadata = ()) -> pb.ListAdaptersResponse:
    return await served.control.ListAdapters(pb.ListAdaptersRequest(deployment_id="d"), metadata=metadata)


async def list_names(served: Runtime, metadata: Metadata = ()) -> list[str]:
    return [one.name for one in (await list_adapters(served, metadata)).adapters]
