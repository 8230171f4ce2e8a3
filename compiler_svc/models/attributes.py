"""Typed reading of a `config.json`, collecting every mistake before complaining."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from bundle.errors import FieldViolation
from compiler_svc.models.errors import NOTHING, ModelConfigInvalid, ModelNotServed
from compiler_svc.models.size_limits import find_largest_value


@dataclass
class AttributeReader:
    """Reads attributes of one JSON object. A mistake is noted and the fallback returned; `finish` raises.

    JSON null counts as absent. In a `with` statement, the end of the body finishes. Errors call the models `family`.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    family: str = ""
    invalid: list[FieldViolation] = field(default_factory=list)
    not_served: list[FieldViolation] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.finish()

    def nested(self, name: str, values: Mapping[str, Any]) -> AttributeReader:
        """A reader of an object inside, noting into the same lists."""
        return AttributeReader(values, f"{self.prefix}{name}.", self.family, self.invalid, self.not_served)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer from `minimum` to the limit of its name; required where there is no default."""
        value, largest = self.values.get(name), find_largest_value(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= largest:
            return value
        self.note_invalid(name, value, f"an integer from {minimum} to {largest}")
        return minimum

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`; required where there is no default."""
        number = self.optional_number(name, above=above)
        if number is None:
            if default is None and self.values.get(name) is None:
                self.note_invalid(name, None, f"a number above {above:g}")
            return above + 1.0 if default is None else default
        return number

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        """A finite number greater than `above`, or None where it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if _is_number(value) and value > above:
            return float(value)
        self.note_invalid(name, value, f"a number above {above:g}")
        return None

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers, required."""
        value = self.values.get(name)
        if isinstance(value, list) and len(value) == length and all(_is_number(item) and item > 0 for item in value):
            return tuple(float(item) for item in value)
        self.note_invalid(name, value, f"a list of {length} positive numbers")
        return (1.0,) * length

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.note_invalid(name, value, "true or false")
        return default

    def choice(self, name: str, default: str, served: Collection[str]) -> str:
        """One of the served words."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, str) and value in served:
            return value
        self.note_not_served(name, value, ", ".join(sorted(served)))
        return default

    def note_invalid(self, name: str, value: object, accepted: str) -> None:
        """Notes an impossible value."""
        _note(self.invalid, FieldViolation(self.prefix + name, _show(value), accepted))

    def note_not_served(self, name: str, value: object, accepted: str) -> None:
        """Notes a value that is possible but not served."""
        _note(self.not_served, FieldViolation(self.prefix + name, _show(value), accepted))

    def finish(self) -> None:
        """Complains about everything noted."""
        if self.invalid:
            raise ModelConfigInvalid(self.invalid, family=self.family)
        if self.not_served:
            raise ModelNotServed(self.not_served)


def _note(violations: list[FieldViolation], violation: FieldViolation) -> None:
    # An attribute that is read twice is wrong once.
    if violation not in violations:
        violations.append(violation)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _show(value: object) -> str:
    try:
        text = NOTHING if value is None else repr(value)
    except ValueError:  # an integer beyond Python's limit on digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
