"""Turns as chat templates get them, beside what transformers' renderer makes of the same turns."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from execution.text.chat_template import ChatTemplate
from execution.text.prompt import ChatMessage, ContentPart, ToolCall

#: A turn with every field that transformers documents, as its users write it, but for a content of None, which
#: transformers leaves out.
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "type": "function",
            "id": "c1",
            "function": {"name": "add", "arguments": {"b": 1.50, "a": 12345678901234567890}},
        }
    ],
    "reasoning_content": "I had better add.",
}
ANSWER = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
MESSAGES = (
    ChatMessage(
        role="assistant",
        tool_calls=(ToolCall("c1", "add", '{"b": 1.50, "a": 12345678901234567890}'),),
        reasoning_content="I had better add.",
    ),
    ChatMessage(role="tool", content="3", tool_call_id="c1", name="add"),
)

TOOLS_TEMPLATE = """{% for message in messages %}{{ message.role }}:
{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content is none %}nothing{% else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{ call.id }} {{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}{% if message.tool_call_id is defined %}{{ message.name }} answers {{ message.tool_call_id }}{% endif %}
{% endfor %}"""

STRINGS = "{% for message in messages %}{{ '[' + message['content'] + ']' }}{% endfor %}"
PARTS = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.type }}={{ part.text }};{% endfor %}{% endif %}{% endfor %}"""


def test_a_turn_that_calls_tools_and_its_answer() -> None:
    documents = [message.for_template(takes_parts=False) for message in MESSAGES]
    assert documents == [CALL, ANSWER]
    rendered = ChatTemplate(TOOLS_TEMPLATE, {}).render(documents, tools=[], add_generation_prompt=False)
    (expected,), _ = render_jinja_template([[CALL, ANSWER]], chat_template=TOOLS_TEMPLATE)
    assert rendered == expected
    assert 'add({"b": 1.5, "a": 12345678901234567890})' in rendered


def test_what_is_unset_is_absent() -> None:
    assert ChatMessage(role="user").for_template(takes_parts=True) == {"role": "user"}
    calls = ChatMessage(role="assistant", content="", tool_calls=(ToolCall("", "now"),)).for_template(takes_parts=True)
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    assert calls == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(("template", "expected"), [(STRINGS, "[a\nb]"), (PARTS, "text=a;text=b;")])
def test_parts_become_what_the_template_reads(template: str, expected: str) -> None:
    message = ChatMessage(role="user", parts=(ContentPart("text", "a"), ContentPart("text", "b")))
    compiled = ChatTemplate(template, {})
    document = message.for_template(takes_parts=compiled.takes_parts)
    assert compiled.render([document], tools=[], add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (STRINGS, False),
        (PARTS, True),
        ("{% for p in messages[0]['content'] | selectattr('type', 'equalto', 'text') %}{% endfor %}", True),
        ("{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}", True),
        ("{% set text = messages[0]['content'] %}{% for part in text %}{{ part }}{% endfor %}", True),
        ("{% set text = messages[0]['role'] %}{% for part in text %}{{ part }}{% endfor %}", False),
        ("{% for tool in tools %}{{ tool.content }}{% endfor %}", False),
    ],
)
def test_templates_that_loop_over_parts_are_known(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source, {}).takes_parts is takes_parts


def test_size_counts_every_text() -> None:
    message = ChatMessage("user", None, (ContentPart("text", "abc"),), (ToolCall("1", "f", "{}"),), "1", "me", "hm")
    assert message.size == len("abc") + len("{}") + len("me") + len("hm")
    document: dict[str, Any] = ChatMessage("user", "four").for_template(takes_parts=True)
    assert document["content"] == "four"
