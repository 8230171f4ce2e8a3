"""Named errors in a form that one process can send to another."""

from __future__ import annotations

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
            violations=error.violations,
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


def _name(error_class: type[KilnError]) -> str:
    return f"{error_class.__module__}:{error_class.__qualname__}"


def _subclasses(root: type[KilnError]) -> list[type[KilnError]]:
    return [root, *(found for child in root.__subclasses__() for found in _subclasses(child))]
