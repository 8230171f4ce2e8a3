"""Chat templates and tokenizers of strangers: what does not end, or takes all memory, ends alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import runtime_pb2 as runtime

from bundle.abi.outputs import EMBEDDINGS
from execution.text import handle
from runtime_svc.metrics import list_metrics
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.bundles.published import TOKENIZER_JSON
from tests.checkpoints.tokenizer_files import byte_level
from tests.hang_guard import HANG_S
from tests.processes import name_of, note_others, own_children
from tests.ranks.fakes import expected_tokens
from tests.running_time import running_time
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, tokens_of

TIMEOUT_S = 0.5
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
#: It goes on for as long as it may.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}" + "{% endfor %}" * 3
#: 3 GB, each in another way.
LARGE = {
    "repetition": "{{ ('a' * 3000000000) | length }}",
    "width of a format": "{{ '{:>3000000000}'.format(1) }}",
    "width within a width": "{{ '{:>{}}'.format(1, 3000000000) }}",
    "width of a conversion": "{{ '%99999999999d' % 1 }}",
    "width of padding": "{{ 'a'.ljust(3000000000) }}",
    "width of a filter": "{{ 'a' | center(3000000000) }}",
    "range": "{{ range(3000000000) | list | length }}",
}
#: Doubles a string until memory ends; no single step is large.
DOUBLING = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
#: A text of which this takes for ever to find that it does not match. The library gives up one match after ten million
#: steps, not the many of a text.
BACKTRACKING, ENDLESS_TEXT = r"(?:(a+)+)+\1b", ("a" * 21 + " ") * 500


def backtracking_tokenizer() -> bytes:
    tokenizer = byte_level()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(BACKTRACKING), "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return tokenizer.to_str().encode()


@asynccontextmanager
async def serve(tmp_path: Path, *arguments: str) -> AsyncIterator[Runtime]:
    """A runtime with limits that tests can wait for, and a deployment `other` that behaves."""
    with pytest.MonkeyPatch.context() as patch:
        # On the clock, others that have the processors would be to blame.
        patch.setattr(handle, "CLOCK_FACTOR", HANG_S / TIMEOUT_S)
        async with serve_runtime(tmp_path, f"--text-timeout={TIMEOUT_S}", *arguments) as served:
            await served.deploy("other", ref="other")
            yield served


@asynccontextmanager
async def staying_healthy(served: Runtime) -> AsyncIterator[None]:
    """Asks all the while for health, which comes within a second, and for tokens of the deployment that behaves."""
    health, slowest_s = health_pb2_grpc.HealthStub(served.channel), 0.0

    async def watch() -> None:
        nonlocal slowest_s
        while True:
            with running_time() as taken:
                await health.Check(health_pb2.HealthCheckRequest())
            slowest_s = max(slowest_s, taken.s)
            assert await tokenize(served, deployment_id="other", text="a cat", timeout_s=HANG_S)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield
        assert not task.done(), task.exception()
        assert slowest_s < 1.0
    finally:
        task.cancel()


async def tokenize(served: Runtime, *, deployment_id: str = "d", timeout_s: float = HANG_S, **prompt: Any) -> list[int]:
    request = pb.TokenizeRequest(deployment_id=deployment_id, **prompt)
    return list((await served.generation.Tokenize(request, timeout=timeout_s)).token_ids)


@pytest.fixture(autouse=True)
def _others() -> None:
    note_others()


def text_processes() -> set[int]:
    return {child.pid for child in own_children() if name_of(child) == "kiln-text"}


async def test_chats_that_do_not_end_fail_alone(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.deploy(chat_template=ENDLESS)
        async with staying_healthy(served):
            chats = [asyncio.create_task(tokenize(served, chat=CHAT)) for _ in range(2)]
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(tokenize(served, text="a cat"))
            for chat in chats:
                caught = await refused(chat, "INVALID_ARGUMENT", "PROMPT_LIMIT_EXCEEDED", "chat")
                assert caught.metadata["limit"] == f"{TIMEOUT_S:g} s of processor time"
            assert await behind == await tokenize(served, deployment_id="other", text="a cat")
        assert tokens_of(await served.generate([5], 3)) == expected_tokens([5], 3)
        (row,) = (row for row in list_metrics(served.server.deployments) if row.name == "kiln:text_process_restarts")
        assert dict(row.read()) == {("d",): 2, ("other",): 0}


@pytest.mark.parametrize("name", LARGE)
async def test_large_results_are_refused(served: Runtime, name: str) -> None:
    await served.deploy(chat_template=LARGE[name])
    processes = text_processes()
    await refused(tokenize(served, chat=CHAT), "INVALID_ARGUMENT", "REQUEST_INVALID", "chat")
    assert text_processes() == processes, "it cost no process"


async def test_memory_is_bounded(tmp_path: Path) -> None:
    async with serve(tmp_path, "--text-memory=200MiB", "--text-timeout=20") as served:
        await served.deploy(chat_template=DOUBLING)
        async with staying_healthy(served):
            caught = await refused(tokenize(served, chat=CHAT), "INVALID_ARGUMENT", "PROMPT_LIMIT_EXCEEDED")
            assert caught.metadata["limit"] == "200 MiB of memory"
            assert await tokenize(served, text="a cat")


async def test_a_power_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Jinja computes it while it compiles the template."""
    async with serve(tmp_path) as served, staying_healthy(served):
        served.publish(chat_template="{{ 9 ** (9 ** 9) }}")
        caught = await refused(served.load("story"), "FAILED_PRECONDITION", "MANIFEST_INVALID")
        assert "chat template: line 1" in caught.metadata["detail"]
        assert (await served.get()).state == runtime.Deployment.STATE_FAILED
        await served.unload()


async def test_a_text_that_the_tokenizer_does_not_end_with_fails_alone(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.deploy(tokenizer=backtracking_tokenizer(), flags=(*DYNAMIC_FLAGS, EMBEDDINGS))
        async with staying_healthy(served):
            assert await tokenize(served, text="a cat")
            call = served.generation.Generate(pb.GenerateRequest(deployment_id="d", text=ENDLESS_TEXT))
            await refused(call, "INVALID_ARGUMENT", "PROMPT_LIMIT_EXCEEDED", "text")
            inputs = [pb.EmbedInput(text=text) for text in ("a cat", ENDLESS_TEXT)]
            vectors: Any = served.generation.Embed(pb.EmbedRequest(deployment_id="d", inputs=inputs))
            await refused(vectors, "INVALID_ARGUMENT", "PROMPT_LIMIT_EXCEEDED", "inputs[1].text")
            assert await tokenize(served, text="a cat")


async def test_a_truncated_tokenizer_fails_its_load(tmp_path: Path) -> None:
    async with serve(tmp_path) as served, staying_healthy(served):
        served.publish(tokenizer=TOKENIZER_JSON[: len(TOKENIZER_JSON) // 2])
        caught = await refused(served.load("story"), "FAILED_PRECONDITION", "MANIFEST_INVALID")
        assert "tokenizer" in caught.metadata["detail"]


async def test_a_load_has_limits(tmp_path: Path) -> None:
    """Of memory here; of time in the tests of text processes."""
    async with serve_runtime(tmp_path, "--text-memory=1MiB") as served:
        document = json.loads(TOKENIZER_JSON)
        document["added_tokens"] += [
            dict(document["added_tokens"][0], id=1000 + number, content=f"<{number}>") for number in range(20_000)
        ]
        served.publish(tokenizer=json.dumps(document).encode())
        caught = await refused(served.load("story"), "FAILED_PRECONDITION", "TEXT_LIMIT_EXCEEDED")
        assert caught.metadata["limit"] == "1 MiB of memory"
        assert served.groups[-1].is_closed
        assert (await served.get()).state == runtime.Deployment.STATE_FAILED


async def test_a_chat_that_its_client_gives_up_is_dropped(tmp_path: Path) -> None:
    async with serve(tmp_path, "--text-timeout=60") as served:
        await served.deploy(chat_template=ENDLESS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(served, chat=CHAT, timeout_s=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError):
            # Waits its turn, and never gets it.
            await tokenize(served, chat=CHAT, timeout_s=0.2)
        with running_time() as taken:
            assert await tokenize(served, text="a cat")
        assert taken.s < 5


async def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.deploy(chat_template=ENDLESS)
        (pid,) = text_processes() - await _processes_of_other(served)
        os.kill(pid, signal.SIGKILL)
        assert await tokenize(served, text="a cat")
        # One that dies while it works is not to blame: what it did is begun again.
        chat = asyncio.create_task(tokenize(served, chat=CHAT))
        await asyncio.sleep(0.1)
        (pid,) = text_processes() - await _processes_of_other(served)
        os.kill(pid, signal.SIGKILL)
        await refused(chat, "INVALID_ARGUMENT", "PROMPT_LIMIT_EXCEEDED")


async def test_shutdown_waits_for_no_text(tmp_path: Path) -> None:
    async with serve(tmp_path, "--text-timeout=60") as served:
        await served.deploy(chat_template=ENDLESS)
        chat = asyncio.create_task(tokenize(served, chat=CHAT))
        await asyncio.sleep(0.2)
        with running_time() as taken:
            await served.server.deployments.shut_down(0.0)
        assert taken.s < 1
        assert not text_processes()
        with pytest.raises(grpc.aio.AioRpcError):
            await chat


async def _processes_of_other(served: Runtime) -> set[int]:
    text = served.server.deployments.get("other").require_serving().text
    assert text._queue is not None
    pid = text._queue._process.pid
    assert pid is not None
    return {pid}


async def test_tokens_that_the_model_lacks_end_their_own_request_before_a_step(served: Runtime) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER_JSON.decode())
    tokenizer.add_tokens([f"<x{number}>" for number in range(5000)])
    await served.deploy(tokenizer=tokenizer.to_str().encode())
    other = asyncio.create_task(served.generate([5], 20))
    request = pb.GenerateRequest(deployment_id="d", text="a cat <x4999>")
    caught = await refused(served.generation.Generate(request), "INVALID_ARGUMENT", "REQUEST_INVALID")
    assert "of the model" in caught.fields["text"]
    assert tokens_of(await other) == expected_tokens([5], 20)
    assert served.engine().scheduler.statistics.rank_restarts == 0
