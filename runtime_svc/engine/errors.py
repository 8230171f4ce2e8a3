"""Errors of sessions.

KilnError
└── RuntimeServiceError
    ├── SessionBusy                 a session whose request has not ended
    ├── SessionNotFound
    └── TooManySessions             a new session while requests use all that may be
"""

from __future__ import annotations

from runtime_svc.errors import RuntimeServiceError


class SessionBusy(RuntimeServiceError):
    """A session that a request uses: its requests go one after the other."""

    reason = "SESSION_BUSY"

    def __init__(self, session_id: str, request_id: str) -> None:
        super().__init__(
            f"session {session_id!r} is in use by request {request_id!r}, which has not ended",
            session_id=session_id,
            request_id=request_id,
        )


class SessionNotFound(RuntimeServiceError):
    """A session that the caller does not have: it has expired, made room for others, or never was."""

    reason = "SESSION_NOT_FOUND"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the caller has no session {session_id!r}", session_id=session_id)


class TooManySessions(RuntimeServiceError):
    """A new session while requests use as many sessions as a caller or a deployment may have."""

    reason = "TOO_MANY_SESSIONS"

    def __init__(self, limit: int, bounded: str) -> None:
        super().__init__(
            f"requests use {limit} sessions, as many as a {bounded} may have", retry_after_s=1.0, limit=limit
        )
