"""Converts prompts and text to tokens and back, with the tokenizer and chat template of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bundle.manifest import Tokens
from runtime_svc.text.chat_template import ChatTemplate
from runtime_svc.text.output import NoText, SequenceText
from runtime_svc.text.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from runtime_svc.text.tokenizer import Tokenizer, read_special_tokens
from runtime_svc.text.tools import parse_object


class TextCodec:
    """Converts prompts to tokens and tokens to text. If the bundle has no tokenizer, it takes only token ids."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None) -> None:
        """Takes the parts that the bundle has; a chat template needs a tokenizer."""
        self.tokenizer = tokenizer
        self._chat_template = chat_template

    @classmethod
    def from_files(cls, files: Mapping[str, Path], chat_template: str | None, tokens: Tokens) -> TextCodec:
        """Reads a bundle's tokenizer. Slow: call it in a thread.

        Args:
            files: Verified files by title: `tokenizer.json`, and `tokenizer_config.json` if the bundle has one.
            chat_template: The Jinja source; None if the bundle has none.
            tokens: Ids of the special tokens that templates get if there is no `tokenizer_config.json`.

        Raises:
            ChatTemplateError: The template is not valid Jinja.
            ValueError: A file cannot be read.
        """
        if "tokenizer.json" not in files:
            return cls(None, None)
        tokenizer = Tokenizer(files["tokenizer.json"])
        if chat_template is None:
            return cls(tokenizer, None)
        if "tokenizer_config.json" in files:
            special_tokens = read_special_tokens(files["tokenizer_config.json"])
        else:
            special_tokens = _special_tokens_by_id(tokenizer, tokens)
        return cls(tokenizer, ChatTemplate(chat_template, special_tokens))

    @property
    def max_token_bytes(self) -> int:
        """The longest text of one token, in UTF-8; 0 without a tokenizer."""
        return 0 if self.tokenizer is None else self.tokenizer.max_token_bytes

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt that admission has checked. Slow for long prompts: call it in a thread.

        Raises:
            ChatTemplateError: The template refused the messages, or failed.
        """
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        assert self.tokenizer is not None
        if isinstance(prompt, TextPrompt):
            return self.tokenizer.encode(prompt.text, add_special_tokens=True)
        return self.tokenizer.encode(self._render(prompt), add_special_tokens=False)

    def sequence_text(self, stop_strings: Sequence[str]) -> SequenceText | NoText:
        """Makes the output text of a new sequence."""
        return NoText() if self.tokenizer is None else SequenceText(self.tokenizer, stop_strings)

    def _render(self, prompt: ChatPrompt) -> str:
        assert self._chat_template is not None
        return self._chat_template.render(
            [message.for_template(takes_parts=self._chat_template.takes_parts) for message in prompt.messages],
            tools=[parse_object(tool) for tool in prompt.tools_json],
            add_generation_prompt=prompt.add_generation_prompt,
        )


def _special_tokens_by_id(tokenizer: Tokenizer, tokens: Tokens) -> dict[str, str]:
    ids = {"bos_token": tokens.bos, "eos_token": tokens.eos[0] if tokens.eos else None, "pad_token": tokens.pad}
    texts = {name: tokenizer.token_of(token_id) for name, token_id in ids.items() if token_id is not None}
    return {name: text for name, text in texts.items() if text is not None}
