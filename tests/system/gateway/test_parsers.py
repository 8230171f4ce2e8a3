"""Parsers of SMG read calls of tools as the templates write them by which `kiln serve` chooses these parsers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from kiln_client.cli.local.serve import TOOL_CALL_PARSERS, choose_tool_call_parser

from tests.bundles.published import CHAT_TEMPLATE
from tests.servers.gateway import post_json, run_gateway
from tests.servers.runtime import serve_runtime

_JSON = '{"name": "call", "arguments": {"key": "value"}}'
_LLAMA = '{"name": "call", "parameters": {"key": "value"}}'
#: A call of `call` as templates write it, by whose they are.
WRITTEN = {
    "Qwen 3, Hermes, SmolLM 3": f"<tool_call>\n{_JSON}\n</tool_call>",
    "Qwen 3 Coder": "<tool_call>\n<function=call>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "Mistral 7B v0.3": f"[TOOL_CALLS] [{_JSON}]",
    "Mistral Small 3": f"[TOOL_CALLS][{_JSON}]",
    "Granite 3": f"<|tool_call|>[{_JSON}]",
    "Phi 4 mini": f"<|tool_call|>{_JSON}<|/tool_call|>",
    "JSON alone": _JSON,
    "Llama 3.2": _LLAMA,
    "Llama 3.1 with its tag": f"<|python_tag|>{_LLAMA}",
    "Llama 4": '[call(key="value")]',
    "LFM 2": '<|tool_call_start|>[call(key="value")]<|tool_call_end|>',
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>call\n"
        '```json\n{"key": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>call<｜tool▁sep｜>"
        '{"key": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "GLM 4.5": "<tool_call>call\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
    "GLM 4.7": "<tool_call>call<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.call:0<|tool_call_argument_begin|>"
        '{"key": "value"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="call">\n<parameter name="key">value</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "Command A": '<|START_ACTION|>[{"tool_name": "call", "parameters": {"key": "value"}}]<|END_ACTION|>',
}
#: What none of its parsers reads.
UNREAD = {
    "Mistral Small 3.2": '[TOOL_CALLS]call[CALL_ID]aB3dE6gH9[ARGS]{"key": "value"}',
    "Devstral Small": '[TOOL_CALLS]call[ARGS]{"key": "value"}',
    "Command R": 'Action:\n```json\n[\n    {"tool_name": "call", "parameters": {"key": "value"}}\n]```',
}
TOOL = {"type": "function", "function": {"name": "call", "parameters": {"type": "object"}}}


async def test_calls_are_read_as_templates_write_them(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        await served.deploy(chat_template=CHAT_TEMPLATE)

        def parse_all() -> tuple[dict[str, list[Any]], list[Any]]:
            with run_gateway(tmp_path, [served.address], HF_ENDPOINT="http://127.0.0.1:0") as url:
                read = {family: parse(url, text) for family, text in WRITTEN.items()}
                return read, [parse(url, text, parser) for text in UNREAD.values() for _, parser in TOOL_CALL_PARSERS]

        read, unread = await asyncio.to_thread(parse_all)
        assert read == {family: [("call", {"key": "value"})] for family in WRITTEN}
        assert not any(unread)


def test_rows_are_those_that_families_need() -> None:
    assert {choose_tool_call_parser(text) for text in WRITTEN.values()} == {parser for _, parser in TOOL_CALL_PARSERS}
    assert not any(map(choose_tool_call_parser, ["<function=call>", *UNREAD.values()]))


def parse(url: str, written: str, parser: str | None = None) -> list[Any]:
    """Names and arguments of the calls that SMG's parser for a text, or the given one, reads in it."""
    parser = parser or choose_tool_call_parser(f"<|user|>?<|assistant|>{written}<|end|>")
    body = {"text": written, "tool_call_parser": parser, "tools": [TOOL]}
    called = [call["function"] for call in post_json(f"{url}/parse/function_call", body)["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in called]
