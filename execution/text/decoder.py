"""What every decoder of tokens has, whether it asks a tokenizer or a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from execution.text.detokenizer import REPLACEMENT

# Bounded, because a vocabulary has up to some hundred thousand tokens; a few thousand of them are frequent.
_NUM_CACHED: Final = 8192


class TokenDecoder(ABC):
    """Turns tokens into text."""

    def __init__(self) -> None:
        #: `decode` of one token.
        self.decode_one = lru_cache(maxsize=_NUM_CACHED)(self._decode_one)
        #: Returns the text of one token alone; special tokens have none.
        self.token_text = lru_cache(maxsize=_NUM_CACHED)(self._decode_alone)

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Bytes that form no character show as U+FFFD."""

    def _decode_one(self, token_id: int) -> str:
        return self.decode([token_id])

    def _decode_alone(self, token_id: int) -> str:
        once = self.decode_one(token_id)
        if REPLACEMENT in once:
            return once
        # Some decoders strip the first space of a text; of two tokens, they strip it from the first only.
        return self.decode([token_id, token_id])[len(once) :]
