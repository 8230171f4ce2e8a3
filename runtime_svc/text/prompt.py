"""Prompts as clients give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenized with the tokenizer's own special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template.

    Attributes:
        messages: Turns with `role` and `content`, oldest first.
        tools: What the model may call, as the template expects it.
        add_generation_prompt: Open the assistant's turn.
    """

    messages: tuple[Mapping[str, str], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt
