"""Errors of text processes."""

from __future__ import annotations

from bundle.errors import KilnError, Unsaid


class TextError(KilnError, reason="TEXT_FAILED"):
    """Root of the errors of text processes. It has no code, so that each of them states its own."""


class TextInvalid(TextError, code="FAILED_PRECONDITION"):
    """A tokenizer or a chat template that cannot be read."""

    message = "{subject}: {detail}"
    subject: str
    detail: str


class TextRefused(TextError, code="INVALID_ARGUMENT"):
    """A prompt that the chat template or the tokenizer refuses.

    Attributes:
        detail: What it says.
        is_unbounded: Whether the template asks for a result without bound.
    """

    message = "{detail}"
    detail: str
    is_unbounded: Unsaid[bool] = False


class TextLimitExceeded(TextError, code="FAILED_PRECONDITION"):
    """Work that reached a limit of the text process: its template or its tokenizer hardly ends, or takes much memory.

    Attributes:
        work: What the process did.
        limit: The limit, with its unit.
    """

    message = "{work} took more than {limit}"
    work: str
    limit: str


class TextProcessLost(TextError, code="UNAVAILABLE"):
    """A text process that ended by itself while it worked."""

    message = "the text process ended while it was {work}: {how}"
    retry_after_s = 1.0
    work: str
    how: str
