"""The kinds of prompts that clients send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from execution.text.tools import parse_object


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text. The tokenizer adds its own special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a turn; `kind` is `text`, a medium such as `image`, or None for a part that this code does not know."""

    kind: str | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments_json` is one JSON object, or empty for no arguments."""

    call_id: str
    name: str
    arguments_json: str = ""

    def for_template(self) -> dict[str, Any]:
        """Returns the call as transformers' templates expect it: the arguments are an object, not text."""
        function = {"name": self.name, "arguments": parse_object(self.arguments_json) if self.arguments_json else {}}
        return {"type": "function", **({"id": self.call_id} if self.call_id else {}), "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; None is unset, and so is empty where None cannot be. It has `content` or `parts`, not both."""

    role: str
    content: str | None = None
    parts: tuple[ContentPart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""
    thinking: str | None = None
    reasoning: str | None = None

    @property
    def size(self) -> int:
        """Its length in characters."""
        return sum(map(len, self._texts()))

    def for_template(self, *, takes_parts: bool) -> dict[str, Any]:
        """Returns the turn as `ChatTemplate.render` takes it. What is unset is absent.

        A template that does not loop over parts gets their texts, a line break between them.
        """
        turn = {
            "role": self.role,
            "content": self._content_for_template(takes_parts) if self.parts else self.content,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id or None,
            "name": self.name or None,
            "reasoning_content": self.reasoning_content or None,
            "thinking": self.thinking,
            "reasoning": self.reasoning,
        }
        return {name: value for name, value in turn.items() if value is not None}

    def _content_for_template(self, takes_parts: bool) -> str | list[dict[str, str]]:
        if takes_parts:
            return [{"type": "text", "text": part.text} for part in self.parts]
        return "\n".join(part.text for part in self.parts)

    def _texts(self) -> Iterator[str]:
        yield from (self.content or "", self.reasoning_content, self.thinking or "", self.reasoning or "", self.name)
        yield from (part.text for part in self.parts)
        yield from (call.arguments_json for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template.

    Attributes:
        messages: Turns, oldest first.
        tools_json: Tools that the model may call, one JSON object each; see `execution.text.tools`.
        add_generation_prompt: Whether the prompt opens the assistant's turn.
        template: Name of the chat template; empty for the one that transformers would choose.
        size: Length of all its texts in characters, counted once because there may be many.
    """

    messages: tuple[ChatMessage, ...]
    tools_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    template: str = ""
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size = sum(message.size for message in self.messages) + sum(map(len, self.tools_json))
        object.__setattr__(self, "size", size)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which the runtime uses as they are, unless they are `bare`: then the tokenizer's own come around them.

    Bare ids are those of a text that a router made tokens of, without the special tokens that a tokenizer adds.
    """

    token_ids: tuple[int, ...]
    bare: bool = False


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The size of a prompt that has not been converted yet.

    Attributes:
        field: Path of the field of the API that has it: of `text`, `chat` or `token_ids`; empty if there is none.
        num_bytes: Of the text in UTF-8, or of the chat or the ids on the wire.
        num_items: Messages or token ids.
    """

    field: str
    num_bytes: int
    num_items: int = 0


def prompt_size(prompt: Prompt) -> int:
    """Returns the length of a prompt, in characters or tokens."""
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(size=size):
            return size
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)
