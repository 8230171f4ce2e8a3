"""Streams that clients, deadlines or ranks stop, as their clients see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import read_refusal, refused
from tests.servers.runtime import Runtime, token_request, tokens_of


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end reaches the client within the margin, or not at all: this one is ten times as long as the server's."""
    monkeypatch.setattr("runtime_svc.api.generation.DEADLINE_MARGIN_S", 0.5)


ABORT = pb.AbortRequest(deployment_id="d", request_id="victim")


async def abort(served: Runtime) -> None:
    """Frees the slot before it answers."""
    assert (await served.generation.Abort(ABORT)).outcome == pb.AbortResponse.OUTCOME_ABORTED
    assert (await served.get()).load.used_slots == 0


async def lose_rank(served: Runtime) -> None:
    served.ranks.die()


async def wait(_: Runtime) -> None:
    """Until the deadline."""


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize(
    ("end", "code", "reason", "finish_reason"),
    [
        (abort, "ABORTED", "REQUEST_ABORTED", pb.FINISH_REASON_ABORTED),
        (lose_rank, "UNAVAILABLE", "RANK_DIED", pb.FINISH_REASON_ERROR),
        (wait, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", pb.FINISH_REASON_TIME),
    ],
)
async def test_a_stopped_stream_has_one_terminal_event_before_its_status(
    served: Runtime, end: Callable[[Runtime], Any], code: str, reason: str, finish_reason: int
) -> None:
    await served.deploy(num_slots=1)
    served.ranks.step_s = 0.05
    call = served.generation.Generate(token_request([5], 60, request_id="victim"), timeout=2 if end is wait else None)
    events = [await anext(aiter(call)), await anext(aiter(call))]
    await end(served)
    events += (await refused(call, code, reason)).events
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert finished == events[-1].finished
    assert finished.reason == finish_reason
    assert read_refusal(finished.status).reason == reason
    assert finished.usage.generated_tokens == len(tokens_of(events)) > 0
    assert (await served.generation.Abort(ABORT)).outcome == pb.AbortResponse.OUTCOME_ALREADY_FINISHED
    assert tokens_of(await served.generate([7])) == expected_tokens([7], 5)


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
async def test_a_client_that_leaves_frees_its_slot_within_a_step(served: Runtime, leave: str) -> None:
    await served.deploy()
    served.ranks.step_s = 0.005
    channel = grpc.aio.insecure_channel(served.address)
    call = type(served.generation)(channel).Generate(token_request([5], 60))
    await anext(aiter(call))
    await anext(aiter(call))
    served.ranks.gate.clear()
    if leave == "cancel":
        call.cancel()
    else:
        await channel.close()
    # The step that is under way cannot end, and none can begin but one that was called ahead.
    await served.wait_for_slots(0)
    assert len(served.ranks.steps) < 60, "the sequence was over before its client left"
    served.ranks.gate.set()
    await channel.close()
