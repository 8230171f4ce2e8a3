"""Errors of captured inputs.

RuntimeServiceError
├── TooManyCaptures
└── CaptureUnwritable    a disk that does not take captured inputs
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class TooManyCaptures(RuntimeServiceError):
    """A request for captured inputs while the allowed number of requests captures."""

    reason = "TOO_MANY_CAPTURES"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{limit} requests capture inputs already", retry_after_s=retry_after_s, limit=limit)


class CaptureUnwritable(RuntimeServiceError):
    """A disk that does not take captured inputs."""

    reason = "CAPTURE_UNWRITABLE"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(
            f"captured inputs cannot be written to {path} in the capture directory: {detail}", path=path, detail=detail
        )
