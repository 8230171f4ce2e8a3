"""The tokenizer and the chat template of one bundle or checkpoint, loaded in a text process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bundle.manifest import choose_template
from execution.text.call_forms import CallForm, find_form
from execution.text.chat_template import ChatTemplate, ChatTemplateError
from execution.text.control import Load, SequenceTokens, TokenPiece
from execution.text.detokenizer import Detokenizer
from execution.text.matchers import Matchers
from execution.text.prompt import ChatMessage, ChatPrompt
from execution.text.tokenizer import Tokenizer, read_special_tokens
from execution.text.tools import parse_object


class BundleText:
    """Converts prompts to tokens and tokens to text. Whatever it does may take for ever, and any amount of memory."""

    def __init__(
        self, tokenizer: Tokenizer, chat_templates: Mapping[str, ChatTemplate], matchers: Matchers | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_templates = chat_templates
        #: What a process for constraints does, and none else.
        self.matchers = matchers

    @classmethod
    def load(cls, load: Load) -> BundleText:
        """Reads the files of a `Load`; raises ValueError if one cannot be read."""
        tokenizer = Tokenizer(Path(load.tokenizer))
        if load.matches:
            return cls(tokenizer, {}, Matchers(tokenizer, load.vocab_size, load.eos))
        if not load.chat_templates:
            return cls(tokenizer, {})
        special_tokens = find_special_tokens(load, tokenizer)
        templates = {name: ChatTemplate(source, special_tokens) for name, source in load.chat_templates.items()}
        return cls(tokenizer, templates)

    def encode_text(self, text: str) -> list[int]:
        """Returns the token ids of a text, with the tokens that the tokenizer adds."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Returns the token ids of a chat that admission has checked. The template writes the special tokens."""
        tools = [parse_object(tool) for tool in prompt.tools_json]
        text = self._render(prompt.template, prompt.messages, tools, prompt.add_generation_prompt)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def find_call_form(self, template: str) -> CallForm | None:
        """Finds how a chat template writes calls of tools; None if in no form that is known, or if it refuses them."""
        try:
            return find_form(partial(self._render, template))
        except ChatTemplateError:
            return None

    def _render(
        self, name: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], opens_turn: bool
    ) -> str:
        """Renders a chat with the template of a name, or the one that transformers chooses if that is empty."""
        chosen = choose_template(self._chat_templates, name, has_tools=bool(tools))
        assert chosen is not None, "a chat needs a template"
        template = self._chat_templates[chosen]
        turns = [message.for_template(takes_parts=template.takes_parts) for message in messages]
        return template.render(turns, tools=tools, add_generation_prompt=opens_turn)

    def detokenize(self, sequence: SequenceTokens) -> list[TokenPiece]:
        """Returns what the detokenizer of a sequence makes of its new tokens."""
        decoder = self.tokenizer
        detokenizer = Detokenizer(
            decoder.decode, decoder.decode_one, window=sequence.window, num_emitted=sequence.num_emitted
        )
        return [
            TokenPiece(
                text=detokenizer.push(token_id),
                rest=detokenizer.peek(),
                window=list(detokenizer.window),
                num_emitted=detokenizer.num_emitted,
            )
            for token_id in sequence.token_ids
        ]


def find_special_tokens(load: Load, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that chat templates get, by name; raises ValueError if the file that has them has none."""
    if load.tokenizer_config is None:
        return _special_tokens_by_id(tokenizer, load.special_ids)
    return read_special_tokens(Path(load.tokenizer_config))


def _special_tokens_by_id(tokenizer: Tokenizer, special_ids: Mapping[str, int]) -> dict[str, str]:
    texts = {name: tokenizer.token_of(token_id) for name, token_id in special_ids.items()}
    return {name: text for name, text in texts.items() if text is not None}
