"""Errors of the runtime's state and of declared deployments, which end the process before it serves."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation, KilnError


class StartupError(KilnError, reason="STARTUP_FAILED"):
    """Root of the errors that end the process before it serves."""


class StateInUse(StartupError):
    """A state directory that another runtime holds."""

    message = "another runtime uses the state directory {path}"
    path: str


class StateInvalid(StartupError):
    """A state directory that cannot be opened or read."""

    message = "the state at {path} cannot be read: {detail}"
    path: str
    detail: str


class DeploymentsFileInvalid(StartupError):
    """A deployments file that cannot be read, or that has an invalid entry."""

    message = "{path}: {violations}"
    path: str
    violations: Sequence[FieldViolation]
