"""Errors of text processes.

KilnError
└── TextError
    ├── TextInvalid           a tokenizer or a chat template that cannot be read
    ├── TextRefused           a prompt that the chat template or the tokenizer refuses
    ├── TextLimitExceeded     work that reached a limit of the process
    └── TextProcessLost       a text process that ended by itself
"""

from __future__ import annotations

from bundle.errors import KilnError


class TextError(KilnError):
    """Root of the errors of text processes."""

    reason = "TEXT_FAILED"


class TextInvalid(TextError):
    """A tokenizer or a chat template that cannot be read."""

    reason = "TEXT_INVALID"

    def __init__(self, subject: str, detail: str) -> None:
        self.subject, self.detail = subject, detail
        super().__init__(f"{subject}: {detail}", subject=subject, detail=detail)


class TextRefused(TextError):
    """A prompt that the chat template or the tokenizer refuses.

    Attributes:
        detail: What it says.
        is_unbounded: Whether the template asks for a result without bound.
    """

    reason = "TEXT_REFUSED"

    def __init__(self, detail: str, *, is_unbounded: bool = False) -> None:
        self.detail, self.is_unbounded = detail, is_unbounded
        super().__init__(detail, detail=detail)


class TextLimitExceeded(TextError):
    """Work that reached a limit of the text process: its template or its tokenizer hardly ends, or takes much memory.

    Attributes:
        work: What the process did.
        limit: The limit, with its unit.
    """

    reason = "TEXT_LIMIT_EXCEEDED"

    def __init__(self, work: str, limit: str) -> None:
        self.work, self.limit = work, limit
        super().__init__(f"{work} took more than {limit}", work=work, limit=limit)


class TextProcessLost(TextError):
    """A text process that ended by itself while it worked."""

    reason = "TEXT_PROCESS_LOST"

    def __init__(self, work: str, how: str) -> None:
        super().__init__(f"the text process ended while it was {work}: {how}", retry_after_s=1.0, work=work, how=how)
