"""The text of a sequence as the engine sees it: it knows no tokenizer."""

from __future__ import annotations

from typing import Protocol


class OutputText(Protocol):
    """The text of one sequence, as its tokens arrive."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met, None before."""

    @property
    def num_chars(self) -> int | None:
        """Characters of the text so far, with those that are held back; None if there is no tokenizer."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; nothing after a stop string."""

    def flush(self) -> str:
        """Text that was held back, at the end of the sequence."""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
