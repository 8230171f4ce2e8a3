"""Constraints of strangers: what takes too long fails alone, and the loss of a process is no one's fault."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as pb
from tokenizers import decoders

from execution.text import handle
from tests.bundles.manifests import DYNAMIC
from tests.checkpoints.tokenizer_files import byte_fallback, metaspace
from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.running_time import running_time
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of

#: The states of its expressions are multiplied.
HOSTILE = json.dumps(
    {"allOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b){{{count}}}$"} for c in "ab" for count in range(3, 12)]}
)
LETTERS = pb.OutputConstraint(regex="(cat|dog)(cat|dog){9}")


@pytest.fixture
async def picking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    """A runtime whose deployment picks tokens on the host."""
    # On the clock, others that have the processors would be to blame.
    monkeypatch.setattr(handle, "CLOCK_FACTOR", HANG_S)
    async with serve_runtime(tmp_path) as served:
        await served.deploy(sampling=msgspec.structs.replace(DYNAMIC, mode="host"))
        yield served


def ask(constraint: pb.OutputConstraint) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_new_tokens=60)
    return pb.GenerateRequest(deployment_id="d", token_ids=pb.TokenIds(ids=[5, 6]), constraint=constraint, stop=stop)


async def deploy(served: Runtime, deployment_id: str, library: tokenizers.Tokenizer) -> None:
    """Deploys a bundle with another tokenizer."""
    sampling = msgspec.structs.replace(DYNAMIC, mode="host")
    await served.deploy(deployment_id, ref=deployment_id, tokenizer=library.to_str().encode(), sampling=sampling)


async def write(served: Runtime, constraint: pb.OutputConstraint = LETTERS) -> str:
    events = await served.ask(ask(constraint))
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN, events[-1]
    return "".join(event.delta.text for event in events)


async def test_a_hostile_schema_stalls_no_one(picking: Runtime) -> None:
    """Health comes at once, and other calls go on, those with constraints too."""
    assert re.fullmatch(LETTERS.regex, await write(picking))
    hostile = asyncio.create_task(
        refused(
            picking.generation.Generate(ask(pb.OutputConstraint(json_schema=HOSTILE))),
            "INVALID_ARGUMENT",
            "CONSTRAINT_LIMIT_EXCEEDED",
            "constraint.json_schema",
        )
    )
    health, slowest_s, num_written = health_pb2_grpc.HealthStub(picking.channel), 0.0, 0
    while not hostile.done():
        with running_time() as taken:
            await health.Check(health_pb2.HealthCheckRequest())
        slowest_s = max(slowest_s, taken.s)
        assert re.fullmatch(LETTERS.regex, await write(picking))
        assert tokens_of(await picking.generate([7, 8])) == expected_tokens([7, 8], 5)
        num_written += 1
        await asyncio.sleep(0.01)
    assert (await hostile).metadata["limit"] == "1 s of processor time"
    assert num_written >= 2
    assert slowest_s < 1.0
    assert await write(picking, pb.OutputConstraint(regex="dog")) == "dog"


async def test_sequences_go_on_when_a_process_is_lost(picking: Runtime) -> None:
    assert re.fullmatch(LETTERS.regex, await write(picking))
    picking.ranks.step_s = 0.02
    text = picking.server.deployments.get("d").require_serving().text
    assert text.constraints is not None
    writing = [asyncio.create_task(write(picking)) for _ in range(2)]
    await asyncio.sleep(0.2)
    follower = (await text.constraints._follower.get())._process
    assert follower.pid is not None
    os.kill(follower.pid, signal.SIGKILL)
    for one in writing:
        assert re.fullmatch(LETTERS.regex, await one)
    assert follower.has_ended
    assert text.num_restarts == 1


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
async def test_clients_get_a_choice_though_the_decoder_takes_spaces_off(
    picking: Runtime, make: Callable[[], tokenizers.Tokenizer]
) -> None:
    await deploy(picking, "marked", make())
    for text in ("a cat", " a cat", "  a cat"):
        request = ask(pb.OutputConstraint(choices=pb.Choices(texts=[text])))
        request.deployment_id = "marked"
        events = await picking.ask(request)
        assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN, events[-1]
        assert "".join(event.delta.text for event in events) == text


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
async def test_clients_get_the_space_behind_a_special_token(
    picking: Runtime, make: Callable[[], tokenizers.Tokenizer]
) -> None:
    """And their offsets count it."""
    await deploy(picking, "marked", make())
    tag = json.dumps({"format": {"type": "const_string", "value": "<s> a cat"}})
    request = ask(pb.OutputConstraint(structural_tag=tag))
    request.deployment_id, request.output.logprobs = "marked", 0
    events = await picking.ask(request)
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN, events[-1]
    text, tokens = (
        "".join(event.delta.text for event in events),
        [one for event in events for one in event.delta.tokens],
    )
    assert text == " a cat"
    assert all(text[one.text_offset :].startswith(one.text) for one in tokens)
    assert tokens[-1].text_offset == len(text)


async def test_a_character_that_no_token_has_ends_its_request_alone(picking: Runtime) -> None:
    await deploy(picking, "marked", metaspace())
    fields = {"日": "constraint.regex", "(a|b)日": "constraint"}
    for pattern, field in fields.items():
        request = ask(pb.OutputConstraint(regex=pattern))
        request.deployment_id = "marked"
        reason = "REQUEST_INVALID" if pattern == "日" else "CONSTRAINT_UNSPELLED"
        writing = asyncio.create_task(write(picking))
        refusal = await refused(picking.generation.Generate(request), "INVALID_ARGUMENT", reason, field)
        assert "'日'" in refusal.fields[field]
        assert re.fullmatch(LETTERS.regex, await writing)


async def test_a_tokenizer_whose_text_depends_on_neighbours_is_refused_at_once(picking: Runtime) -> None:
    library = byte_fallback()
    library.decoder = decoders.WordPiece()
    await deploy(picking, "pieces", library)
    request = ask(LETTERS)
    request.deployment_id = "pieces"
    before = set(psutil.Process().children(recursive=True))
    call = picking.generation.Generate(request)
    refusal = await refused(call, "INVALID_ARGUMENT", "FEATURE_NOT_SERVED", "constraint.regex")
    assert "depends on the tokens beside them" in refusal.fields["constraint.regex"]
    assert set(psutil.Process().children(recursive=True)) == before


async def test_processes_end_with_their_deployment(picking: Runtime) -> None:
    before = set(psutil.Process().children(recursive=True))
    await write(picking)
    begun = set(psutil.Process().children(recursive=True)) - before
    assert len([one for one in begun if "text" in one.name()]) == 2, begun
    await picking.server.deployments.shut_down(0.0)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in begun)
