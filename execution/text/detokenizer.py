"""Decodes tokens that arrive one by one.

`tokenizers.decoders.DecodeStream` does not serve here: it raises on byte-fallback tokens that form no character, and it
does not give out the text that it still holds back at the end of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT: Final = "\ufffd"

# A character has at most four bytes: bytes that are unfinished after this many tokens never become one.
MAX_PENDING_TOKENS: Final = 16


class Detokenizer:
    """Emits text as soon as later tokens cannot change it, and never a part of a character.

    It decodes a window that begins with tokens whose text it has emitted already, because decoders treat the start of a
    text differently: some strip its first space. It cuts the text of those tokens off again.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        decode_one: Callable[[int], str] | None = None,
        *,
        window: Sequence[int] = (),
        num_emitted: int = 0,
    ) -> None:
        """Starts a sequence, or goes on with one whose detokenizer had this `window` and `num_emitted`.

        Both functions leave special tokens out; a caller with a cache of single tokens gives `decode_one`.
        """
        self._decode = decode
        self._decode_one = decode_one
        self.window = list(window)
        #: How many tokens of the window have been emitted.
        self.num_emitted = num_emitted
        #: Their text decoded alone.
        self._emitted = decode(self.window[:num_emitted]) if num_emitted else ""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now, often that of this token."""
        self.window.append(token_id)
        text, length = self._decode(self.window), len(self._emitted)
        is_unfinished = text.endswith(REPLACEMENT) and len(self.window) - self.num_emitted < MAX_PENDING_TOKENS
        if is_unfinished or len(text) <= length:
            return ""
        del self.window[: self.num_emitted]
        self.num_emitted = len(self.window)
        if self.num_emitted == 1 and self._decode_one is not None:
            self._emitted = self._decode_one(token_id)
        else:
            self._emitted = self._decode(self.window)
        return text[length:]

    def peek(self) -> str:
        """Returns what `flush` would return."""
        return self._decode(self.window)[len(self._emitted) :]

    def flush(self) -> str:
        """Returns the rest at the end of the sequence. Bytes that became no character show as U+FFFD."""
        text = self.peek()
        self.window.clear()
        self.num_emitted, self._emitted = 0, ""
        return text
