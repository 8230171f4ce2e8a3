"""Chat templates against transformers' renderer."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from execution.text.chat_template import ChatTemplate, ChatTemplateError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Answer <b>briefly</b> & 'well'."},
    {"role": "user", "content": "  Où est le chat ? 🐈\n"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "Merci"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_cat",
            "description": "Finds <cats> & café",
            "parameters": {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}},
        },
    }
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}""",
    "llama": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
    {%- for message in loop_messages %}
        {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
        {%- else %}{{ ' ' ~ message.content ~ ' ' ~ eos_token }}{% endif %}
    {%- endfor %}""",
    "tools": """{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% endif %}{{ messages[-1].content | upper }}""",
    "generation": """{% set found = 'outside' %}{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{% set found = 'inside' %}{{ message.content }}{{ found }}{% endgeneration %}
{% endif %}{% endfor %}{{ found }}{{ documents is none }}""",
    "whitespace": """{% for message in messages -%}
    {# a remark #}
    {% if message.role == "user" %}
  {{ message.content }}
    {% endif %}
{% endfor %}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(name: str, tools: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    rendered = ChatTemplate(TEMPLATES[name], TOKENS).render(
        MESSAGES, tools=tools, add_generation_prompt=add_generation_prompt
    )
    (expected,), _ = render_jinja_template(
        [MESSAGES],
        tools=tools or None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **TOKENS,
    )
    assert rendered == expected


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(source, TOKENS).render(messages or MESSAGES, tools=[], add_generation_prompt=True)


def test_date_of_today() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year + 1)}


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{{ messages[0].nonsense.more }}", "nonsense"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages | tojson(indent='x', sort_keys=nothing.at_all) }}", "nothing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "Recursion"),
        ("{% include 'other' %}", "loader"),
        # As transformers refuses them.
        ("{% set ns = namespace(_hidden=1) %}", "_hidden"),
        ("{% set ns = namespace({'_hidden': 1}) %}", "_hidden"),
        ("{% set ns = namespace() %}{% set ns._hidden = 1 %}", "_hidden"),
    ],
)
def test_template_that_fails_says_why(source: str, detail: str) -> None:
    with pytest.raises(ChatTemplateError, match=detail):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "{% nonsense %}"])
def test_source_that_is_no_template(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate(source, TOKENS)
