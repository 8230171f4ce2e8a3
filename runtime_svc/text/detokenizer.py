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

    def __init__(self, decode: Callable[[Sequence[int]], str], decode_one: Callable[[int], str] | None = None) -> None:
        """Starts a sequence.

        Args:
            decode: Turns tokens into text, without special tokens.
            decode_one: The same for a single token, if the caller has a cache of them.
        """
        self._decode = decode
        self._decode_one = decode_one
        self._window: list[int] = []
        #: How many tokens of the window have been emitted, and their text decoded alone.
        self._num_emitted = 0
        self._emitted = ""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now, often that of this token."""
        self._window.append(token_id)
        text, length = self._decode(self._window), len(self._emitted)
        is_unfinished = text.endswith(REPLACEMENT) and len(self._window) - self._num_emitted < MAX_PENDING_TOKENS
        if is_unfinished or len(text) <= length:
            return ""
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window)
        if self._num_emitted == 1 and self._decode_one is not None:
            self._emitted = self._decode_one(token_id)
        else:
            self._emitted = self._decode(self._window)
        return text[length:]

    def flush(self) -> str:
        """Returns the rest at the end of the sequence. Bytes that became no character show as U+FFFD."""
        text = self._decode(self._window)[len(self._emitted) :]
        self._window.clear()
        self._num_emitted, self._emitted = 0, ""
        return text
