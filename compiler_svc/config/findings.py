"""What judging a document brings to light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bundle.errors import FieldViolation
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid, FeatureNotServed


@dataclass(frozen=True)
class Hint:
    """A value that the target ignores.

    Attributes:
        field: Path of the attribute.
        value: What was asked for.
        reason: Why it counts for nothing.
    """

    field: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {show(self.value)} is ignored: {self.reason}"


@dataclass
class Findings:
    """Collects what is found, so that all of it is told at once.

    Attributes:
        mistakes: What no version accepts.
        unserved: What this version does not serve.
        warnings: What the author should know.
        hints: What the target ignores; also among the warnings.
    """

    mistakes: list[FieldViolation] = field(default_factory=list)
    unserved: list[FieldViolation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def add_mistake(self, path: str, value: object, accepted: str) -> None:
        """Notes a mistake."""
        self.mistakes.append(FieldViolation(path, show(value), accepted))

    def add_unserved(self, path: str, value: str, served: tuple[Any, ...]) -> None:
        """Notes a value, as it is to be shown, that is not served, and those that are."""
        accepted = " or ".join("unset" if one is None else show(one) for one in served)
        self.unserved.append(FieldViolation(path, value, f"{accepted}, all that this version serves"))

    def add_hint(self, hint: Hint) -> None:
        """Notes a value that is ignored."""
        self.hints.append(hint)
        self.warnings.append(str(hint))

    def relocate(self, locate: Callable[[str], str]) -> None:
        """Names fields as the author wrote them."""
        self.mistakes = [replace(one, field=locate(one.field)) for one in self.mistakes]
        self.unserved = [replace(one, field=locate(one.field)) for one in self.unserved]

    def raise_if_any(self) -> None:
        """Raises what was found, mistakes first."""
        if self.mistakes:
            raise ConfigInvalid([*self.mistakes, *self.unserved])
        if self.unserved:
            raise FeatureNotServed(self.unserved)
