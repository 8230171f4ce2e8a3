"""How a process fails: named errors in a form that it can send to another one, and words for its end."""

from __future__ import annotations

import signal
from typing import Self

import msgspec

from bundle.errors import FieldViolation, KilnError


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A `KilnError` as plain data."""

    #: Module and class of the error.
    error: str
    message: str
    metadata: dict[str, str]
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: KilnError) -> Self:
        """Makes plain data of an error."""
        return cls(
            error=_name(type(error)),
            message=str(error),
            metadata=error.metadata,
            violations=tuple(error.violations),
            retry_after_s=error.retry_after_s,
        )

    def to_error(self) -> KilnError:
        """Makes the error again, without the attributes that its class adds to those of KilnError.

        A class that this process has not imported becomes a plain KilnError.
        """
        error_class = next((found for found in _subclasses(KilnError) if _name(found) == self.error), KilnError)
        error = error_class.__new__(error_class)
        KilnError.__init__(
            error, self.message, violations=self.violations, retry_after_s=self.retry_after_s, **self.metadata
        )
        return error


def name_cause(exit_code: int | None) -> str:
    """What ended a process: a signal, its own exit code, or the end of its forkserver."""
    if exit_code is None:
        return "the process that it was forked from"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        # Of the real-time signals, only the first and the last have names.
        return f"signal {-exit_code}"


def _name(error_class: type[KilnError]) -> str:
    return f"{error_class.__module__}:{error_class.__qualname__}"


def _subclasses(root: type[KilnError]) -> list[type[KilnError]]:
    return [root, *(found for child in root.__subclasses__() for found in _subclasses(child))]
