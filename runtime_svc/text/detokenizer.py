"""Text from tokens that arrive one by one.

Why not `tokenizers.decoders.DecodeStream`: it raises on byte-fallback tokens that form no character, and what it holds
back at the end of a sequence cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT: Final = "\ufffd"

# A character has at most four bytes: what is unfinished after this many tokens will never be one.
MAX_PENDING_TOKENS: Final = 16


class Detokenizer:
    """Emits text as soon as later tokens cannot change it, and never a part of a character.

    Tokens are decoded in a window that begins with tokens whose text is out already, because decoders treat the start
    of a text differently, by stripping its first space for one; the text of that prefix is cut off again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], decode_one: Callable[[int], str] | None = None) -> None:
        """Starts a sequence.

        Args:
            decode: Turns tokens into text, special tokens left out.
            decode_one: The same for a single token; for who remembers what tokens are.
        """
        self._decode = decode
        self._decode_one = decode_one
        self._window: list[int] = []
        #: Tokens of the window whose text is out, and that text by itself.
        self._num_emitted = 0
        self._emitted = ""

    def push(self, token_id: int) -> str:
        """Text that is certain now, often that of this token."""
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
        """The rest, at the end: bytes that became no character show as U+FFFD."""
        text = self._decode(self._window)[len(self._emitted) :]
        self._window.clear()
        self._num_emitted, self._emitted = 0, ""
        return text
