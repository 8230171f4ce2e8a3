"""Errors of the runtime's state and of declared deployments, which end the process before it serves.

KilnError
└── StartupError                no client sees it
    ├── StateInUse
    ├── StateInvalid
    └── DeploymentsFileInvalid
"""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError


class StartupError(KilnError):
    """Root of the errors that end the process before it serves."""

    reason = "STARTUP_FAILED"


class StateInUse(StartupError):
    """A state directory that another runtime holds."""

    reason = "STATE_IN_USE"

    def __init__(self, path: str) -> None:
        super().__init__(f"another runtime uses the state directory {path}", path=path)


class StateInvalid(StartupError):
    """A state directory that cannot be opened or read."""

    reason = "STATE_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"the state at {path} cannot be read: {detail}", path=path, detail=detail)


class DeploymentsFileInvalid(StartupError):
    """A deployments file that cannot be read, or that has an invalid entry."""

    reason = "DEPLOYMENTS_FILE_INVALID"

    def __init__(self, path: str, violations: Sequence[FieldViolation]) -> None:
        super().__init__(f"{path}: " + "; ".join(map(str, violations)), violations=tuple(violations), path=path)
