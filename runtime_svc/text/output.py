"""The text of one generated sequence: detokenized, and cut at the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from execution.text.control import SequenceTokens, TokenPiece
from execution.text.decoder import TokenDecoder
from execution.text.detokenizer import Detokenizer


class SequenceText:
    """Detokenizes a sequence and watches for stop strings."""

    def __init__(self, decoder: TokenDecoder, stop_strings: Sequence[str]) -> None:
        """Starts a sequence."""
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder.decode, decoder.decode_one)
        self._matcher = StopStringMatcher(stop_strings)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met; None before."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now. After a stop string, returns no text."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the sequence."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone."""
        return self._decoder.token_text(token_id)


class PiecewiseText:
    """The text of a sequence that a text process detokenizes, which watches for stop strings.

    Before a token is pushed, `take` has got its piece.
    """

    def __init__(self, texts: Sequence[str], stop_strings: Sequence[str]) -> None:
        """Starts a sequence; `texts` has the text of each token alone."""
        self._texts = texts
        self._matcher = StopStringMatcher(stop_strings)
        self._pieces = deque[TokenPiece]()
        self._newest = TokenPiece(text="", rest="", window=[], num_emitted=0)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met; None before."""
        return self._matcher.matched

    def describe(self, token_ids: Sequence[int]) -> SequenceTokens:
        """Returns what the process needs to make the pieces of the next tokens."""
        return SequenceTokens(self._newest.window, self._newest.num_emitted, list(token_ids))

    def take(self, pieces: Sequence[TokenPiece]) -> None:
        """Takes the pieces of the next tokens, of which the sequence may leave the last ones out."""
        self._pieces = deque(pieces)

    def push(self, token_id: int) -> str:  # noqa: ARG002 - its piece is known
        """Takes the next token; returns the text that is certain now. After a stop string, returns no text."""
        self._newest = self._pieces.popleft()
        return self._matcher.push(self._newest.text)

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the sequence."""
        rest, self._newest = self._newest.rest, TokenPiece(text="", rest="", window=[], num_emitted=0)
        return self._matcher.push(rest) + self._matcher.flush()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone."""
        return self._texts[token_id] if token_id < len(self._texts) else ""


class NoText:
    """The output text of a bundle without a tokenizer: it is always empty."""

    stop_string: str | None = None

    def push(self, token_id: int) -> str:  # noqa: ARG002
        """Takes the next token; returns no text."""
        return ""

    def flush(self) -> str:
        """Returns no text."""
        return ""

    def token_text(self, token_id: int) -> str:  # noqa: ARG002
        """Returns no text for any token."""
        return ""


class StopStringMatcher:
    """Finds the stop string that is complete first, in text that comes in pieces of any length.

    If two end at the same character, the one that begins earlier wins. The matcher holds back text that may begin a
    stop string. It delivers the text before a stop string, never the stop string or the text behind it.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Looks for `stop_strings`; none may be empty."""
        assert all(stop_strings), "a stop string is empty"
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        #: The stop string that the text has met; None before.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text to deliver. After a stop string, returns no text."""
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
        """Returns the text that is still held back at the end: it became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
