"""Errors of adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from bundle.errors import FieldViolation, KilnError, Unsaid
from compiler_svc.weights.errors import MAX_LISTED, join_layers


class AdapterError(KilnError, code="INVALID_ARGUMENT", reason="ADAPTER_INVALID"):
    """Root of the errors of adapters."""


class AdapterNotFound(AdapterError, code="NOT_FOUND"):
    """A path that holds no adapter."""

    message = "no adapter: {violation}"
    violation = FieldViolation("{field}", "{path} ({detail})", "{accepted}")
    path: Path | str
    detail: str
    accepted: Unsaid[str]
    field: Unsaid[str] = "adapter"


class AdapterInvalid(AdapterError):
    """An adapter whose configuration, files or tensors are not what they should be, or do not fit the model."""

    message = "adapter {path} cannot be served: {violations}"
    path: Path | str
    violations: Sequence[FieldViolation]

    @classmethod
    def listing(cls, path: Path | str, violations: Iterable[FieldViolation]) -> Self:
        """Lists mistakes, at least one and the first of many. Those that differ in the layer only become one."""
        return cls(path, join_layers(violations)[:MAX_LISTED])
