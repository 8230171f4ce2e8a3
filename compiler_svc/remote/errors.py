"""Errors of checkpoints that a URL names.

CompilerError
├── ModelUrlRefused       a URL below no prefix that the operator accepts
├── ModelUrlUnsupported   a URL whose scheme is unknown, or lacks its package
└── ModelFetchFailed      a checkpoint that could not be fetched

OutlineMissing reaches no client.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation
from compiler_svc.errors import CompilerError


class ModelUrlRefused(CompilerError):
    """A model's URL below no prefix that the operator accepts."""

    reason = "MODEL_URL_REFUSED"

    def __init__(self, url: str, accepted: Sequence[str]) -> None:
        places = f"a URL below {' or '.join(accepted)}, or a path" if accepted else "a path"
        violation = FieldViolation(
            "model", repr(url), f"{places}; --model-url PREFIX of the compiler accepts more URLs"
        )
        super().__init__(str(violation), violations=(violation,), url=url)


class ModelUrlUnsupported(CompilerError):
    """A model's URL whose scheme is unknown, or lacks its package."""

    reason = "MODEL_URL_UNSUPPORTED"

    def __init__(self, url: str, accepted: str) -> None:
        violation = FieldViolation("model", repr(url), accepted)
        super().__init__(str(violation), violations=(violation,), url=url)


class ModelFetchFailed(CompilerError):
    """A checkpoint that could not be fetched."""

    reason = "MODEL_FETCH_FAILED"

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(f"{url} could not be fetched: {detail}", url=url, detail=detail)


class OutlineMissing(Exception):
    """A plan that goes on once the service has fetched the outline of a URL: it has no credentials for that."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url
