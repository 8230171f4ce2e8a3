"""Several sequences of one prompt, over loopback: order of events, seeds, limits, ends, log and trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog
from kiln.runtime.v1 import generation_pb2 as pb
from structlog.testing import capture_logs

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import HANG_S
from tests.ranks.engines import letters
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, details_of, hold, raises, serve_runtime, token_request, tokens_of
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
    events = [event async for event in served.generation.Generate(request)]
    return divide(events, request.num_sequences)


async def take_all(call: Any) -> tuple[list[pb.GenerateResponse], list[Any]]:
    """Every event of a call that fails, and the error."""
    events: list[pb.GenerateResponse] = []
    async with raises("ABORTED", "REQUEST_ABORTED") as caught:
        async for event in call:
            events.append(event)  # noqa: PERF401 - those before the error count
    return events, caught


async def test_sequences_have_seeds_of_their_own_and_share_the_prompt(served: Runtime) -> None:
    await served.deploy(**BLOCKS)
    prompt = list(range(10, 23))
    sequences = await generate(served, several(prompt, 4, 9, temperature=0.7, seed=11))
    assert [tokens_of(events) for events in sequences] == [expected_tokens(prompt, 9, seed=11 + i) for i in range(4)]
    assert sequences[0][0].accepted.sampling.seed == 11
    usages = [events[-1].finished.usage for events in sequences]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, 12, 12, 12]
    assert {usage.prompt_tokens for usage in usages} == {13}
    for index, own in enumerate(sequences):
        alone = await served.generate(prompt, 9, temperature=0.7, seed=11 + index)
        assert tokens_of(alone) == tokens_of(own)


async def test_without_a_seed_sequences_differ(served: Runtime) -> None:
    await served.deploy()
    sequences = await generate(served, several([5], 3, 12, temperature=1.0))
    assert len({tuple(tokens_of(events)) for events in sequences}) == 3


async def test_a_stop_string_ends_one_sequence(served: Runtime) -> None:
    await served.deploy(tokenizer=None, chat_template=None)
    whole = [letters(expected_tokens([5], 30, seed=seed)) for seed in range(2)]
    assert whole[0] != whole[1]
    stop = expected_tokens([5], 30, seed=1)[10]
    assert stop not in expected_tokens([5], 30, seed=0)
    request = several([5], 2, 30, temperature=0.7, seed=0)
    request.stop.stop_token_ids.append(stop)
    sequences = await generate(served, request)
    reasons = [events[-1].finished.reason for events in sequences]
    assert reasons == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP_TOKEN]
    assert [len(tokens_of(events)) for events in sequences] == [30, expected_tokens([5], 30, seed=1).index(stop) + 1]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ((), 16),
        (("--max-sequences-per-request=3",), 3),
        # Four slots and a queue for two.
        (("--queue-capacity=2",), 6),
    ],
)
async def test_how_many_sequences_there_may_be(tmp_path: Path, arguments: tuple[str, ...], limit: int) -> None:
    async with serve_runtime(tmp_path, *arguments) as served:
        assert (await served.deploy()).capabilities.max_num_sequences == limit
        assert len(await generate(served, several([5], limit, 2))) == limit
        for count in (-1, 0, limit + 1):
            async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
                await served.generation.Generate(several([5], count)).read()
            (violation,) = details_of(caught[0])[1].field_violations
            assert violation.field == "num_sequences"
            assert violation.description == f"got {count}; accepted: 1 to {limit}"


async def test_sessions_and_captures_have_one_sequence(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, f"--capture-directory={tmp_path / 'captures'}") as served:
        await served.deploy(**BLOCKS)
        for other, options in (
            ("session_id", {"session_id": "s"}),
            ("output.capture_inputs", {"output": pb.OutputOptions(capture_inputs=pb.InputCapture())}),
        ):
            request = several([5], 2)
            request.MergeFrom(pb.GenerateRequest(**options))
            async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as caught:
                await served.generation.Generate(request).read()
            (violation,) = details_of(caught[0])[1].field_violations
            assert violation.field == "num_sequences"
            assert violation.description.startswith(f"got 2; accepted: 1, beside {other}")
            request.num_sequences = 1
            assert tokens_of([event async for event in served.generation.Generate(request)]) == expected_tokens([5], 5)


async def test_a_call_whose_sequences_do_not_fit_the_queue_leaves_nothing(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--queue-capacity=2") as served:
        await served.deploy()
        running = await hold(served, several([5], 3, 3, request_id="first"))
        async with raises("RESOURCE_EXHAUSTED", "QUEUE_FULL"):
            await served.generation.Generate(several([6], 5)).read()
        load = (await served.get()).load
        assert load.used_slots + load.queued_requests == 3
        served.ranks.gate.set()
        assert len([event async for event in running if event.HasField("finished")]) == 3


async def test_one_sequence_with_invalid_numbers_fails_the_call_when_all_have_ended(served: Runtime) -> None:
    await served.deploy()
    served.ranks.step_s = 0.002
    call = served.generation.Generate(several([5], 3, 40, temperature=0.7, seed=0))
    await served.wait_for_slots(3)
    served.ranks.invalid_rows = (1,)
    events = []
    async with raises("FAILED_PRECONDITION", "NUMERICS_INVALID"):
        async for event in call:
            events.append(event)
            if event.HasField("finished"):
                served.ranks.invalid_rows = ()
    sequences = divide(events, 3)
    assert [events[-1].finished.reason == pb.FINISH_REASON_ERROR for events in sequences] == [False, True, False]
    for index in (0, 2):
        assert tokens_of(sequences[index]) == expected_tokens([5], 40, seed=index)
    tokens = tokens_of(sequences[1])
    assert tokens == expected_tokens([5], len(tokens), seed=1)
    await served.wait_for_slots(0)


async def test_abort_ends_all_sequences_and_their_slots_are_free(served: Runtime) -> None:
    await served.deploy(**BLOCKS)
    call = await hold(served, several([5] * 9, 6, 40, request_id="r"))
    answer = await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="r"))
    assert answer.outcome == pb.AbortResponse.OUTCOME_ABORTED
    load = (await served.get()).load
    assert (load.used_slots, load.used_blocks, load.queued_requests) == (0, 0, 0)
    served.ranks.gate.set()
    events, caught = await take_all(call)
    assert details_of(caught[0])[0].metadata["request_id"] == "r"
    finished = [event.finished for event in events if event.HasField("finished")]
    assert [one.reason for one in finished] == [pb.FINISH_REASON_ABORTED] * 6
    again = await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="r"))
    assert again.outcome == pb.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_a_client_that_leaves_frees_every_slot(served: Runtime) -> None:
    await served.deploy()
    call = await hold(served, several([5], 6, 40))
    call.cancel()
    served.ranks.gate.set()
    await served.wait_for_slots(0)
    async with asyncio.timeout(HANG_S):
        while (await served.get()).load.queued_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_log_and_trace_tell_sequences_apart(tmp_path: Path) -> None:
    with collect_traces() as collector, capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await served.deploy()
            call = served.generation.Generate(several([5, 6], 3, 4), metadata=TRACED)
            divide([event async for event in call], 3)
        (line,) = [log for log in logs if log["event"] == "call" and log["method"].endswith("/Generate")]
        assert (line["finish_reason"], line["prompt_tokens"], line["generated_tokens"]) == ("LENGTH", 2, 12)
        assert line["sequences"] == 3
        spans = [span for span in collector.spans if span.name == "decode steps"]
        attributes = [{one.key: one.value.int_value for one in span.attributes} for span in spans]
        assert [one["kiln.sequence_index"] for one in attributes] == [0, 1, 2]
        assert {one["kiln.generated_tokens"] for one in attributes} == {4}
