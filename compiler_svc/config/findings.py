"""Collects what validation finds in a document: mistakes, what is not served, warnings and hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bundle.errors import FieldViolation
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid, FeatureNotServed


@dataclass(frozen=True)
class Hint:
    """A value that the target ignores, at the path of its attribute, and why."""

    field: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {show(self.value)} is ignored: {self.reason}"


@dataclass
class Findings:
    """Collects findings, so that one error lists all of them. Hints are among the warnings, too.

    No version accepts a value that is a mistake; this version does not serve one that is unserved.
    """

    mistakes: list[FieldViolation] = field(default_factory=list)
    unserved: list[FieldViolation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def add_mistake(self, path: str, value: object, accepted: str) -> None:
        """Adds a mistake."""
        self.mistakes.append(FieldViolation(path, show(value), accepted))

    def add_unserved(self, path: str, value: str, served: tuple[Any, ...]) -> None:
        """Adds a value that is not served, as an error shows it, and those that are."""
        accepted = " or ".join("unset" if one is None else show(one) for one in served)
        self.unserved.append(FieldViolation(path, value, f"{accepted}, all that this version serves"))

    def add_hint(self, hint: Hint) -> None:
        """Adds a value that the target ignores."""
        self.hints.append(hint)
        self.warnings.append(str(hint))

    def relocate(self, locate: Callable[[str], str]) -> None:
        """Renames fields to the paths in the given document, which `locate` finds by those in the expanded one."""
        self.mistakes = [replace(one, field=locate(one.field)) for one in self.mistakes]
        self.unserved = [replace(one, field=locate(one.field)) for one in self.unserved]

    def raise_if_any(self) -> None:
        """Raises an error if there are mistakes, or values that are not served."""
        if self.mistakes:
            raise ConfigInvalid([*self.mistakes, *self.unserved])
        if self.unserved:
            raise FeatureNotServed(self.unserved)
