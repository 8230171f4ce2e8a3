"""A stream of events becomes one completion."""

from __future__ import annotations

import pytest
from kiln.runtime.v1.generation_pb2 import GenerateResponse
from kiln_client import AsyncRuntime, errors

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal


async def test_whole_generation(server: ScriptedServer) -> None:
    server.script("Generate", samples.generation())
    async with AsyncRuntime(server.address) as runtime:
        completion = await runtime.complete("demo", "x")
    assert completion.text == "Once upon"
    assert completion.token_ids == [11, 12]
    assert completion.finish_reason == "length"
    assert completion.stop is None
    assert completion.usage.generated_tokens == 2
    assert completion.weight_epoch == 2
    assert completion.accepted.sampling.seed == 2**63 + 1


async def test_several_sequences(server: ScriptedServer) -> None:
    server.script("Generate", samples.several_sequences())
    async with AsyncRuntime(server.address) as runtime:
        both = await runtime.complete_sequences("demo", "x", num_sequences=2)
        assert [(one.text, one.token_ids) for one in both] == [("Once upon", [11, 12]), ("One ", [13])]
        assert {one.accepted.request_id for one in both} == {"r1"}
        assert server.requests["Generate"][0].num_sequences == 2
        with pytest.raises(ValueError, match="complete_sequences"):
            await runtime.complete("demo", "x", num_sequences=2)
        with pytest.raises(ValueError, match="2 sequences"):
            await runtime.complete("demo", "x")
        server.script("Generate", [*samples.several_sequences()[:4], samples.finished(4)])
        with pytest.raises(errors.StreamIncomplete, match="no finished event of sequence 1"):
            await runtime.complete_sequences("demo", "x", num_sequences=2)


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ([], "accepted"),
        ([samples.accepted(), samples.delta(1, "x", 1)], "finished"),
        ([samples.accepted(), samples.delta(2, "x", 1)], "event 1 is missing"),
        ([samples.delta(0, "x", 1), samples.finished(1)], "accepted"),
    ],
)
async def test_stream_that_ends_silently_is_an_error(
    server: ScriptedServer, events: list[GenerateResponse], missing: str
) -> None:
    server.script("Generate", events)
    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.StreamIncomplete, match=missing) as caught:
            await runtime.complete("demo", "x")
    assert caught.value.reason == "STREAM_INCOMPLETE"


async def test_failure_of_the_stream_is_the_failure(server: ScriptedServer) -> None:
    failed = samples.finished(1, "ERROR")
    server.script("Generate", [samples.accepted(), failed, refusal("UNAVAILABLE", "RANK_DIED", "rank 0 died")])
    async with AsyncRuntime(server.address) as runtime:
        with pytest.raises(errors.Unavailable, match="rank 0 died"):
            await runtime.complete("demo", "x")
