"""Reads a bundle's tokenizer and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from execution.text.decoder import TokenDecoder
from execution.text.table_builder import build_table
from execution.text.token_table import TokenTable

#: Some text: what a tokenizer adds to one, it adds to any.
_PROBE: Final = "a"
#: How the system says what a refused allocation is.
_OUT_OF_MEMORY: Final = "out of memory"
#: How names of special tokens end.
TOKEN_SUFFIX: Final = "_token"


class Tokenizer(TokenDecoder):
    """Converts text to tokens and back, as a `tokenizer.json` defines."""

    def __init__(self, path: Path) -> None:
        """Reads a `tokenizer.json`; raises ValueError with a reason, or MemoryError if it needs too much memory."""
        super().__init__()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception.
        except Exception as error:
            if _OUT_OF_MEMORY in str(error):
                raise MemoryError from error
            raise ValueError(f"{path.name}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        #: The longest spelling of a token in UTF-8; the text of no token is longer.
        self.max_token_bytes = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=0)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text. Takes half a second for each million characters, or for ever."""
        # `encode` and other batches keep offsets, which take much memory.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `TokenDecoder.decode`."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_of(self, token_id: int) -> str | None:
        """Returns the vocabulary's spelling of a token; None if the id is unknown."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def list_surrounding(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens that the tokenizer puts before a text, and those behind it."""
        bare, whole = (self.encode(_PROBE, add_special_tokens=added) for added in (False, True))
        starts = (start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare)
        start = next(starts, None)
        return ([], []) if start is None else (whole[:start], whole[start + len(bare) :])

    def list_added(self) -> list[str]:
        """Returns the tokens that it finds in texts before all others, special ones among them, by id."""
        return [added.content for _, added in sorted(self._tokenizer.get_added_tokens_decoder().items())]

    def make_table(self) -> TokenTable | None:
        """Returns a table that decodes as this does; None if no table can."""
        return build_table(self._tokenizer)

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def to_json(self) -> str:
        """Returns it as a `tokenizer.json` has it, without truncation and padding."""
        return str(self._tokenizer.to_str())

    def list_texts(self) -> list[str]:
        """Returns `token_text` of every token, by id."""
        return [self.token_text(token_id) for token_id in range(self.num_ids)]


def read_special_tokens(path: Path) -> dict[str, str]:
    """Reads the special tokens of a `tokenizer_config.json`, by their names in chat templates, such as `bos_token`.

    Raises ValueError if the file holds no JSON object.
    """
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith(TOKEN_SUFFIX)}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    """Returns a token's text; the file writes it as a string, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
