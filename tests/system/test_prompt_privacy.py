"""The logs of a stack, at the finest level, hold nothing of what clients ask of its models."""

from __future__ import annotations

import grpc
import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.servers.stack import Stack

MARKER = "zebra-7431"


def test_logs_hold_no_prompt(stack: Stack, tiny: str) -> None:
    user = pb.ChatMessage(role="user", content=MARKER)
    stop = pb.StopConditions(max_new_tokens=3)
    answered = pb.GenerateRequest(deployment_id=tiny, request_id="privacy-1", text=MARKER, stop=stop)
    chatted = pb.GenerateRequest(
        deployment_id=tiny, request_id="privacy-2", chat=pb.Chat(messages=[user], tools_json=[MARKER]), stop=stop
    )
    too_long = pb.GenerateRequest(deployment_id=tiny, request_id="privacy-3", text=MARKER * 1000, stop=stop)
    absent = pb.GenerateRequest(deployment_id="absent", request_id="privacy-4", text=MARKER, stop=stop)
    service = stack.generation()
    assert list(service.Generate(answered))
    for refused in (chatted, too_long, absent):
        with pytest.raises(grpc.RpcError):
            list(service.Generate(refused))
    service.Tokenize(pb.TokenizeRequest(deployment_id=tiny, text=MARKER))
    logs = "".join(path.read_text() for path in (stack.home / "logs").iterdir())
    assert all(f"privacy-{number}" in logs for number in range(1, 5)), "the calls are in the logs"
    assert '"level": "debug"' in logs, "all that can be logged is"
    assert MARKER not in logs
