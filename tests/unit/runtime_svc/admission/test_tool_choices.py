"""What chooses tools, and tools that are too large for a constraint; `tests/service` has what else can be wrong."""

from __future__ import annotations

import json

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from execution.text.call_forms import ToolChoice
from execution.text.prompt import ChatMessage, ChatPrompt
from runtime_svc.admission.constraints import MAX_CONSTRAINT_CHARS
from runtime_svc.admission.tool_choices import find_choice_violations
from runtime_svc.api.generation_wire import call_from_pb


def test_all_tools_together_are_bounded() -> None:
    def find(num_chars: int) -> list[str]:
        tools = [json.dumps({"name": f"f{at}", "description": "x" * num_chars}) for at in range(5)]
        prompt = ChatPrompt((ChatMessage("user", content="a"),), tools_json=tuple(tools))
        return [str(one) for one in find_choice_violations(ToolChoice("REQUIRED"), prompt)]

    assert find(MAX_CONSTRAINT_CHARS // 5 - 60) == []
    (found,) = find(MAX_CONSTRAINT_CHARS // 5)
    assert found.startswith("chat.tools_json: got 262")
    assert found.endswith("accepted: at most 262144 characters, beside tool_choice")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        (pb.ToolChoice(), None),
        (pb.ToolChoice(parallel_calls=True), None),
        (pb.ToolChoice(parallel_calls=False), ToolChoice("AUTO", parallel_calls=False)),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_UNSPECIFIED), ToolChoice("AUTO")),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE, parallel_calls=True), ToolChoice("NONE")),
        (pb.ToolChoice(function="find"), ToolChoice("AUTO", "find")),
    ],
)
def test_a_choice_is_a_mode_a_function_or_one_call_at_most(
    choice: pb.ToolChoice | None, expected: ToolChoice | None
) -> None:
    assert call_from_pb(pb.GenerateRequest(tool_choice=choice), request_id="r").tool_choice == expected
