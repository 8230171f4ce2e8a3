"""Validates chats: their messages, parts, calls of tools and tools."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice, starmap
from typing import Final

from bundle.errors import FieldViolation
from bundle.manifest import choose_template
from execution.text.prompt import ChatMessage, ChatPrompt
from execution.text.tools import ACCEPTED_OBJECT, parse_object
from runtime_svc.admission.quotes import MAX_QUOTED_CHARS, MAX_VIOLATIONS_PER_LIST

MAX_TOOLS: Final = 128
MAX_TOOL_CHARS: Final = 64 << 10


def find_chat_violations(prompt: ChatPrompt) -> Iterator[FieldViolation]:
    """Names what no chat may have."""
    if not prompt.messages:
        yield FieldViolation("chat.messages", "none", "at least one message")
    nobodies = [index for index, message in enumerate(prompt.messages) if not message.role]
    for index in nobodies[:MAX_VIOLATIONS_PER_LIST]:
        yield FieldViolation(f"chat.messages[{index}].role", "''", "a role that the chat template knows")
    named = ((f"chat.messages[{index}]", message) for index, message in enumerate(prompt.messages))
    yield from islice(chain.from_iterable(starmap(_message_violations, named)), MAX_VIOLATIONS_PER_LIST)
    if len(prompt.tools_json) > MAX_TOOLS:
        yield FieldViolation("chat.tools_json", f"{len(prompt.tools_json)} tools", f"at most {MAX_TOOLS}")
        return
    for index, text in enumerate(prompt.tools_json):
        yield from _object_violations(f"chat.tools_json[{index}]", text)


def find_template_violations(prompt: ChatPrompt, names: Collection[str]) -> Iterator[FieldViolation]:
    """Names the chat template that the client asks for, or the default, if a bundle that serves chats lacks it."""
    if names and choose_template(names, prompt.template, has_tools=bool(prompt.tools_json)) is None:
        given = repr(prompt.template[:MAX_QUOTED_CHARS]) if prompt.template else "none, and the bundle has no default"
        yield FieldViolation("chat.chat_template", given, f"one of {', '.join(names)}")


def _message_violations(path: str, message: ChatMessage) -> Iterator[FieldViolation]:
    if message.parts and message.content is not None:
        yield FieldViolation(f"{path}.content_parts", "set beside content", "content or content_parts")
    for index, part in enumerate(message.parts):
        if part.kind is None:
            yield FieldViolation(f"{path}.content_parts[{index}]", "none", "text")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            yield FieldViolation(f"{path}.tool_calls[{index}].name", "''", "the name of a function")
        if call.arguments_json:
            yield from _object_violations(f"{path}.tool_calls[{index}].arguments_json", call.arguments_json)


def _object_violations(path: str, text: str) -> Iterator[FieldViolation]:
    if len(text) > MAX_TOOL_CHARS:
        yield FieldViolation(path, f"{len(text)} characters", f"at most {MAX_TOOL_CHARS} characters")
        return
    try:
        parse_object(text)
    except ValueError as error:
        quoted = f"{text[:MAX_QUOTED_CHARS]!r} ({error})"
        yield FieldViolation(path, quoted, ACCEPTED_OBJECT, quotes_text=True)


def find_unserved_parts(prompt: ChatPrompt) -> Iterator[FieldViolation]:
    """Names the parts of messages that are no text."""
    for index, message in enumerate(prompt.messages):
        for number, part in enumerate(message.parts):
            if part.kind not in ("text", None):
                path = f"chat.messages[{index}].content_parts[{number}].{part.kind}"
                yield FieldViolation(path, "set", "text: no model that Kiln serves takes anything else")
