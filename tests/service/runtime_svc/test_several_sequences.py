"""Several sequences of one prompt, over loopback: order of events, seeds, limits, ends, log and trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.ranks.fakes import expected_tokens
from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, hold, serve_runtime, token_request, tokens_of
from tests.servers.traces import TRACED, collect_traces

#: A cache of blocks that shares no prefixes.
BLOCKS: dict[str, Any] = {
    "flags": (*DYNAMIC_FLAGS, COMPUTED_CONTEXT),
    "num_blocks": 64,
    "block_tokens": 4,
    "serving": Serving(),
}


def several(prompt: list[int], num_sequences: int, max_new_tokens: int = 5, **options: Any) -> pb.GenerateRequest:
    request = token_request(prompt, max_new_tokens, **options)
    request.num_sequences = num_sequences
    return request


def divide(events: list[pb.GenerateResponse], count: int) -> list[list[pb.GenerateResponse]]:
    """The events of each sequence; checks the order of all."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds.index("accepted") == 0
    assert kinds.count("accepted") == 1
    assert kinds[-1] == "finished"
    assert {event.sequence_index for event in events} == set(range(count))
    sequences = [[event for event in events if event.sequence_index == index] for index in range(count)]
    for own in sequences:
        assert [event.WhichOneof("event") for event in own].index("finished") == len(own) - 1
    return sequences


async def generate(served: Runtime, request: pb.GenerateRequest) -> list[list[pb.GenerateResponse]]:
    return divide(await served.ask(request), request.num_sequences)


async def test_sequences_have_seeds_of_their_own_and_share_the_prompt(served: Runtime) -> None:
    await served.deploy(**BLOCKS)
    prompt = list(range(10, 23))
    sequences = await generate(served, several(prompt, 4, 9, temperature=0.7, seed=11))
    assert [tokens_of(events) for events in sequences] == [expected_tokens(prompt, 9, seed=11 + i) for i in range(4)]
    assert sequences[0][0].accepted.sampling.seed == 11
    usages = [events[-1].finished.usage for events in sequences]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, 12, 12, 12]
    unseeded = await generate(served, several([5], 3, 12, temperature=1.0))
    assert len({tuple(tokens_of(events)) for events in unseeded}) == 3


# The second has four slots and a queue for two.
@pytest.mark.parametrize(("argument", "limit"), [("--max-sequences-per-request=3", 3), ("--queue-capacity=2", 6)])
async def test_how_many_sequences_there_may_be(tmp_path: Path, argument: str, limit: int) -> None:
    async with serve_runtime(tmp_path, argument) as served:
        assert (await served.deploy()).capabilities.max_num_sequences == limit
        assert len(await generate(served, several([5], limit, 2))) == limit
        request = served.generation.Generate(several([5], limit + 1))
        how = await refused(request, "INVALID_ARGUMENT", "REQUEST_INVALID", "num_sequences")
        assert how.fields["num_sequences"] == f"got {limit + 1}; accepted: 1 to {limit}"


async def test_abort_ends_all_sequences_and_their_slots_are_free(served: Runtime) -> None:
    await served.deploy(**BLOCKS)
    call = await hold(served, several([5] * 9, 6, 40, request_id="r"))
    answer = await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="r"))
    assert answer.outcome == pb.AbortResponse.OUTCOME_ABORTED
    load = (await served.get()).load
    assert (load.used_slots, load.used_blocks, load.queued_requests) == (0, 0, 0)
    served.ranks.gate.set()
    how = await refused(call, "ABORTED", "REQUEST_ABORTED")
    assert how.metadata["request_id"] == "r"
    finished = [event.finished for event in how.events if event.HasField("finished")]
    assert [one.reason for one in finished] == [pb.FINISH_REASON_ABORTED] * 6
    again = await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="r"))
    assert again.outcome == pb.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_log_and_trace_tell_sequences_apart(tmp_path: Path, logs: Logs) -> None:
    with collect_traces() as collector:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await served.deploy()
            divide(await served.ask(several([5, 6], 3, 4), TRACED), 3)
        (line,) = await finished_calls(logs, "/Generate")
        assert (line["finish_reason"], line["prompt_tokens"], line["generated_tokens"]) == ("LENGTH", 2, 12)
        assert line["sequences"] == 3
        spans = [span for span in collector.spans if span.name == "decode steps"]
        attributes = [{one.key: one.value.int_value for one in span.attributes} for span in spans]
        assert [one["kiln.sequence_index"] for one in attributes] == [0, 1, 2]
        assert {one["kiln.generated_tokens"] for one in attributes} == {4}
