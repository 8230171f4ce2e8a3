"""A bundle's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from runtime_svc.text.detokenizer import REPLACEMENT


class Tokenizer:
    """Text to tokens and back, by a `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        """Reads a `tokenizer.json`.

        Raises:
            ValueError: The file is none; the message says why.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception.
        except Exception as error:
            raise ValueError(f"{path.name}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Thousands of tokens come again and again; a vocabulary has up to some hundred thousand.
        self.decode_one = lru_cache(maxsize=8192)(self._decode_one)
        self.token_text = lru_cache(maxsize=8192)(self._decode_alone)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Slow for long texts: call it in a thread.

        Args:
            text: Any text.
            add_special_tokens: Add what the tokenizer adds to a text by itself, such as a begin-of-sequence token.
        """
        # `encode` holds the GIL, `encode_batch` releases it.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no character show as U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_of(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, None for an unknown id."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _decode_one(self, token_id: int) -> str:
        return self.decode([token_id])

    def _decode_alone(self, token_id: int) -> str:
        """A token by itself, special tokens without text."""
        once = self.decode_one(token_id)
        if REPLACEMENT in once:
            return once
        # Decoders that strip the first space of a text strip it from the first of two.
        return self.decode([token_id, token_id])[len(once) :]


def read_special_tokens(path: Path) -> dict[str, str]:
    """Special tokens that a `tokenizer_config.json` names, such as `bos_token`, as chat templates want them.

    Raises:
        ValueError: The file is no JSON object.
    """
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    """A token is written as text, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
