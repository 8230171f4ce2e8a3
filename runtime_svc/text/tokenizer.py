"""Reads a bundle's tokenizer and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from runtime_svc.text.detokenizer import REPLACEMENT


class Tokenizer:
    """Converts text to tokens and back, as a `tokenizer.json` defines."""

    def __init__(self, path: Path) -> None:
        """Reads a `tokenizer.json`.

        Raises:
            ValueError: The library cannot read the file; the message says why.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception.
        except Exception as error:
            raise ValueError(f"{path.name}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        #: The longest spelling of a token in UTF-8; the text of no token is longer.
        self.max_token_bytes = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=0)
        # Bounded, because a vocabulary has up to some hundred thousand tokens; a few thousand of them are frequent.
        self.decode_one = lru_cache(maxsize=8192)(self._decode_one)
        self.token_text = lru_cache(maxsize=8192)(self._decode_alone)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text. Slow for long texts: call it in a thread.

        Args:
            text: Any text.
            add_special_tokens: Whether the tokenizer adds its special tokens, such as a begin-of-sequence token.
        """
        # `encode` holds the GIL, batches release it; the fast one keeps no offsets, which take much memory.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Bytes that form no character show as U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_of(self, token_id: int) -> str | None:
        """Returns the vocabulary's spelling of a token; None if the id is unknown."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _decode_one(self, token_id: int) -> str:
        return self.decode([token_id])

    def _decode_alone(self, token_id: int) -> str:
        """Returns the text of one token alone; special tokens have none."""
        once = self.decode_one(token_id)
        if REPLACEMENT in once:
            return once
        # Some decoders strip the first space of a text; of two tokens, they strip it from the first only.
        return self.decode([token_id, token_id])[len(once) :]


def read_special_tokens(path: Path) -> dict[str, str]:
    """Reads the special tokens of a `tokenizer_config.json`, by their names in chat templates, such as `bos_token`.

    Raises:
        ValueError: The file holds no JSON object.
    """
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    """Returns a token's text; the file writes it as a string, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
