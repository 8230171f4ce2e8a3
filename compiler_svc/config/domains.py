"""Domains of attribute values: which values an attribute takes, and in words what it takes.

Domains judge values of JSON's types. A domain never converts: `"8"` is no integer, `true` is no integer, `8.0` is no
integer; the one exception is an integer where a number is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

LARGEST_INT: Final = 2**31 - 1
_LONGEST_SHOWN: Final = 64


def show(value: object) -> str:
    """A value as a message shows it: escaped, and cut where it is long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer beyond Python's limit on digits; nesting beyond its stack
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


class Domain(Protocol):
    """The values that an attribute takes."""

    @property
    def accepted(self) -> str:
        """The domain in words."""

    def accepts(self, value: object) -> bool:
        """Whether `value`, never None, is in the domain."""

    def normalize(self, value: Any) -> Any:
        """The one spelling of an accepted value."""


@dataclass(frozen=True)
class Integer:
    """Whole numbers from `smallest` to `largest`."""

    smallest: int
    largest: int = LARGEST_INT

    @property
    def accepted(self) -> str:
        """The domain in words."""
        return f"an integer from {self.smallest} to {self.largest}"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, int) and not isinstance(value, bool) and self.smallest <= value <= self.largest

    def normalize(self, value: int) -> int:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Number:
    """Finite numbers from `smallest` to `largest`, `smallest` itself excluded where `positive`."""

    smallest: float
    largest: float = math.inf
    positive: bool = False

    @property
    def accepted(self) -> str:
        """The domain in words."""
        lower = f"greater than {self.smallest:g}" if self.positive else f"at least {self.smallest:g}"
        return f"a finite number {lower}" + (f" and at most {self.largest:g}" if self.largest < math.inf else "")

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        lower = number > self.smallest if self.positive else number >= self.smallest
        return math.isfinite(number) and lower and number <= self.largest

    def normalize(self, value: float) -> float:
        """The value as a float."""
        return float(value)


@dataclass(frozen=True)
class Flag:
    """true and false."""

    accepted: str = "true or false"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, bool)

    def normalize(self, value: bool) -> bool:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Choice:
    """A few words."""

    words: tuple[str, ...]
    #: What may stand before a word, and means nothing.
    prefix: str = ""

    @property
    def accepted(self) -> str:
        """The domain in words."""
        return ", ".join(map(repr, self.words))

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, str) and self.normalize(value) in self.words

    def normalize(self, value: str) -> str:
        """The word without its prefix."""
        return value.removeprefix(self.prefix)


@dataclass(frozen=True)
class AscendingLengths:
    """Lists of lengths in tokens, each longer than the one before; an empty list is none."""

    accepted: str = f"a list of integers from 1 to {LARGEST_INT}, each larger than the one before"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        lengths = list(value) if isinstance(value, list | tuple) else None
        if lengths is None or not all(map(Integer(1).accepts, lengths)):
            return False
        return all(shorter < longer for shorter, longer in itertools.pairwise(lengths))

    def normalize(self, value: list[int]) -> tuple[int, ...]:
        """The list as a tuple."""
        return tuple(value)


@dataclass(frozen=True)
class Table:
    """Objects, whose attributes have a table of their own."""

    accepted: str = "an object"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, Mapping)

    def normalize(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Anything:
    """Every value: the domain of what is not served, where only the default matters."""

    accepted: str = "any value"

    def accepts(self, value: object) -> bool:  # noqa: ARG002
        """Whether `value` is in the domain: always."""
        return True

    def normalize(self, value: Any) -> Any:
        """The value itself."""
        return value
