"""Errors of checkpoints that a URL names."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, Unsaid
from compiler_svc.errors import CompilerError


class ModelUrlRefused(CompilerError, code="PERMISSION_DENIED"):
    """A model's URL below no prefix that the operator accepts."""

    def __init__(self, url: str, accepted: Sequence[str]) -> None:
        places = f"a URL below {' or '.join(accepted)}, or a path" if accepted else "a path"
        violation = FieldViolation(
            "model", repr(url), f"{places}; --model-url PREFIX of the compiler accepts more URLs"
        )
        super().__init__(str(violation), violations=(violation,), url=url)


class ModelUrlUnsupported(CompilerError, code="INVALID_ARGUMENT"):
    """A model's URL whose scheme is unknown, or lacks its package."""

    violation = FieldViolation("model", "{url!r}", "{accepted}")
    url: str
    accepted: Unsaid[str]


class ModelFetchFailed(CompilerError, code="UNAVAILABLE"):
    """A checkpoint that could not be fetched."""

    message = "{url} could not be fetched: {detail}"
    url: str
    detail: str


class OutlineMissing(Exception):
    """Ends a plan, which has no credentials, until the service has fetched a URL's outline. No client sees it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url
