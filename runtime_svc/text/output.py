"""The text of one generated sequence."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_svc.text.detokenizer import Detokenizer
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


class StopStringMatcher:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Of two that end at the same character the one that begins earlier wins. Text that may be the beginning of a stop
    string is held back; text before a stop string is delivered, the stop string and what follows never.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Looks for `stop_strings`, none of them empty."""
        assert all(stop_strings), "a stop string is empty"
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        #: The string that was found.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can be delivered; nothing once a stop string was found."""
        if not self._stop_strings:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Text that was held back, at the end: it became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
