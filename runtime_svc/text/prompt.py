"""The kinds of prompts that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text. The tokenizer adds its own special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template.

    Attributes:
        messages: Turns with `role` and `content`, oldest first.
        tools_json: Tools that the model may call, one JSON object each; see `runtime_svc.text.tools`.
        add_generation_prompt: Whether the prompt opens the assistant's turn.
    """

    messages: tuple[Mapping[str, str], ...]
    tools_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which the runtime uses as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


def prompt_size(prompt: Prompt) -> int:
    """Returns the length of a prompt, in characters or tokens."""
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(messages=messages, tools_json=tools):
            return sum(len(message["content"]) for message in messages) + sum(map(len, tools))
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)
