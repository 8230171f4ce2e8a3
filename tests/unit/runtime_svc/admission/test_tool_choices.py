"""Tools that are too large for a constraint; `tests/service` has what else is wrong with a choice."""

from __future__ import annotations

import json

from execution.text.call_forms import ToolChoice
from execution.text.prompt import ChatMessage, ChatPrompt
from runtime_svc.admission.constraints import MAX_CONSTRAINT_CHARS
from runtime_svc.admission.tool_choices import find_choice_violations


def test_all_tools_together_are_bounded() -> None:
    def find(num_chars: int) -> list[str]:
        tools = [json.dumps({"name": f"f{at}", "description": "x" * num_chars}) for at in range(5)]
        prompt = ChatPrompt((ChatMessage("user", content="a"),), tools_json=tuple(tools))
        return [str(one) for one in find_choice_violations(ToolChoice("REQUIRED"), prompt)]

    assert find(MAX_CONSTRAINT_CHARS // 5 - 60) == []
    (found,) = find(MAX_CONSTRAINT_CHARS // 5)
    assert found.startswith("chat.tools_json: got 262")
    assert found.endswith("accepted: at most 262144 characters, beside tool_choice")
