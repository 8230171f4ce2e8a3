"""Logs never hold what clients ask of models, however their calls end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as engine

from tests.servers.logs import Logs, finished_calls
from tests.servers.runtime import Runtime, details_of, hold, serve_runtime, token_request
from tests.servers.tokens import SigningKey, write_jwks
from tests.servers.vllm_engine import stub_of

MARKER = "zebra-7431"
REFUSING_TEMPLATE = "{{ raise_exception('cannot take ' + messages[0]['content']) }}"


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(deployment_id="d", chat=pb.Chat(messages=messages, **fields))


USER = pb.ChatMessage(role="user", content=MARKER)
CALL = pb.ToolCall(name="find", arguments_json=f"{{{MARKER}")
LONG_STOP = pb.StopConditions(stop_strings=[MARKER * 1000])
#: Name → request, and whether the client's status repeats what it sent.
REQUESTS: dict[str, tuple[pb.GenerateRequest, bool]] = {
    "text": (pb.GenerateRequest(deployment_id="d", text=MARKER, stop=pb.StopConditions(max_new_tokens=3)), False),
    "chat": (chat(USER), False),
    "too long": (pb.GenerateRequest(deployment_id="d", text=MARKER * 10_000), False),
    "unknown deployment": (pb.GenerateRequest(deployment_id="none", text=MARKER), False),
    "long stop string": (pb.GenerateRequest(deployment_id="d", text=MARKER, stop=LONG_STOP), False),
    "tools that are no JSON": (chat(USER, tools_json=[MARKER]), True),
    "arguments that are no JSON": (chat(USER, pb.ChatMessage(role="assistant", tool_calls=[CALL])), True),
    "a template that refuses": (pb.GenerateRequest(deployment_id="refusing", chat=pb.Chat(messages=[USER])), True),
    "a session": (pb.GenerateRequest(deployment_id="d", text=MARKER, session_id=MARKER), True),
}


async def generate(served: Runtime, request: pb.GenerateRequest) -> str:
    """Returns what the client is told of the end, in all its forms."""
    try:
        await served.ask(request)
    except grpc.aio.AioRpcError as error:
        return f"{error.details()}{details_of(error)}"
    return ""


async def test_prompts_stay_out_of_the_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture, logs: Logs) -> None:
    caplog.set_level(logging.DEBUG)
    jwks = write_jwks(tmp_path / "jwks.json", [SigningKey()])
    async with serve_runtime(tmp_path, f"--auth-jwks={jwks}", "--engine-deployment=d") as served:
        await served.deploy("refusing", ref="refusing", chat_template=REFUSING_TEMPLATE)
        await served.deploy()
        for name, (request, is_told) in REQUESTS.items():
            assert (MARKER in await generate(served, request)) == is_told, name
        await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="d", text=MARKER))
        refused = pb.TokenizeRequest(deployment_id="refusing", chat=pb.Chat(messages=[USER]))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.generation.Tokenize(refused)
        _ = [one async for one in stub_of(served).Generate(engine.GenerateRequest(text=MARKER))]
        # One whose client leaves.
        call = await hold(served, pb.GenerateRequest(deployment_id="d", text=MARKER))
        call.cancel()
        served.ranks.gate.set()
        await served.wait_for_slots(0)
    lines = [log for log in logs if log["event"] == "call" and log["method"].endswith(("Generate", "Tokenize"))]
    assert len(lines) >= len(REQUESTS) + 4
    assert {line["code"] for line in lines} >= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
    assert MARKER not in repr(logs)
    assert MARKER not in caplog.text


async def test_what_is_no_prompt_is_logged(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    await generate(served, chat(USER, tools_json=[MARKER]))
    await generate(served, token_request([999_999]))
    messages = [line["message"] for line in await finished_calls(logs, "/Generate", 2)]
    assert "chat.tools_json[0]: got …; accepted: one JSON object" in messages[0]
    assert "token_ids.ids[0]: got 999999; accepted: 0 to " in messages[1]
