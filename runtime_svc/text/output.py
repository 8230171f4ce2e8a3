"""The text of one generated sequence."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_svc.text.detokenizer import Detokenizer
from runtime_svc.text.stopping import StopStringMatcher
from runtime_svc.text.tokenizer import Tokenizer


class SequenceText:
    """Detokenizes a sequence and watches for stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        """Starts a sequence."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.decode, tokenizer.decode_one)
        self._matcher = StopStringMatcher(stop_strings)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met, None before."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Text that is certain now; nothing after a stop string."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Text that was held back, at the end of the sequence."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    def token_text(self, token_id: int) -> str:
        """A token by itself."""
        return self._tokenizer.token_text(token_id)


class NoText:
    """The text of a sequence of a bundle without tokenizer: none."""

    stop_string: str | None = None

    def push(self, token_id: int) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""

    def token_text(self, token_id: int) -> str:  # noqa: ARG002
        """Nothing."""
        return ""
