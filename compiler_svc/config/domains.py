"""Domains of attribute values: which values an attribute takes, and in words what it takes.

Domains accept values of JSON's types and never convert them: `"8"`, `true` and `8.0` are no integers. The one exception
is an integer as a value of `Number`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Any, Final, Literal, Protocol, get_args, get_origin

from compiler_svc.models.size_limits import MAX_INTEGER, MAX_POSITIONS

MAX_INT: Final = MAX_INTEGER
#: In one list. Each bucket is one executable, or several if another list multiplies them.
MAX_BUCKETS: Final = 128
#: In one list or object, such as the names of modules and the paths of adapters. Plans look for each in the model.
MAX_TEXTS: Final = 1024
_MAX_SAFE_INT: Final = 2**53 - 1
_MAX_SHOWN_CHARS: Final = 64


def show(value: object) -> str:
    """Renders a value for a message: escaped, and cut if it is long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer beyond Python's limit on digits; nesting beyond its stack
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


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
    """Integers from `smallest` to `largest`, both included."""

    smallest: int
    largest: int = MAX_INT

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


#: Lengths in tokens.
LENGTH: Final = Integer(1, MAX_POSITIONS)


@dataclass(frozen=True)
class Number:
    """Finite numbers from `smallest` to `largest`, `smallest` itself excluded if `positive`."""

    smallest: float
    largest: float = math.inf
    positive: bool = False

    @property
    def accepted(self) -> str:
        """The domain in words."""
        if self.smallest == -math.inf:
            return "a finite number"
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
class Limit:
    """Limits that values are clamped to: numbers. An infinite one limits nothing and becomes None.

    JSON has no infinity: protobuf writes it as text.
    """

    accepted: str = "a number, infinite for no limit"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return _is_infinite(value) or Number(-math.inf).accepts(value)

    def normalize(self, value: float | str) -> float | None:
        """The value as a float, None if it is infinite."""
        return None if _is_infinite(value) else float(value)


def _is_infinite(value: object) -> bool:
    return value in ("Infinity", "-Infinity") or (isinstance(value, float) and math.isinf(value))


@dataclass(frozen=True)
class Flag:
    """The flags true and false."""

    accepted: str = "true or false"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, bool)

    def normalize(self, value: bool) -> bool:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    #: Text that may precede a word and means nothing.
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
    """Lists of lengths in tokens, each longer than the one before; an empty list stands for no list."""

    accepted: str = (
        f"a list of at most {MAX_BUCKETS} integers from 1 to {MAX_POSITIONS}, each larger than the one before"
    )

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        lengths = list(value) if isinstance(value, list | tuple) else None
        if lengths is None or len(lengths) > MAX_BUCKETS or not all(map(LENGTH.accepts, lengths)):
            return False
        return all(shorter < longer for shorter, longer in itertools.pairwise(lengths))

    def normalize(self, value: list[int]) -> tuple[int, ...]:
        """The list as a tuple."""
        return tuple(value)


@dataclass(frozen=True)
class Text:
    """Text that is not empty, such as a path."""

    accepted: str = "text that is not empty"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, str) and value != "" and _is_unicode(value)

    def normalize(self, value: str) -> str:
        """The value itself."""
        return value


@dataclass(frozen=True)
class ClassPath:
    """Python classes, as "module.Class" or as NxD Inference's files name them, by `__module__` and `__name__`."""

    accepted: str = 'a class such as "module.Class"'

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        if isinstance(value, Mapping):
            return set(value) == {"__module__", "__name__"} and all(map(Text().accepts, value.values()))
        return Text().accepts(value)

    def normalize(self, value: str | Mapping[str, str]) -> str:
        """The class as "module.Class"."""
        return value if isinstance(value, str) else f"{value['__module__']}.{value['__name__']}"


@dataclass(frozen=True)
class TextList:
    """Lists of texts, such as names of modules."""

    accepted: str = f"a list of at most {MAX_TEXTS} texts that are not empty"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, list | tuple) and len(value) <= MAX_TEXTS and all(map(Text().accepts, value))

    def normalize(self, value: list[str]) -> tuple[str, ...]:
        """The list as a tuple."""
        return tuple(value)


@dataclass(frozen=True)
class TextMap:
    """Objects whose values are text, such as paths by name."""

    accepted: str = f"an object whose values are texts that are not empty, at most {MAX_TEXTS} of them"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        if not isinstance(value, Mapping) or len(value) > MAX_TEXTS:
            return False
        return all(map(Text().accepts, (*value, *value.values())))

    def normalize(self, value: Mapping[str, str]) -> dict[str, str]:
        """The value as a dictionary of its own."""
        return dict(value)


@dataclass(frozen=True)
class Paths:
    """Paths of a tree: lists of choices, each an index from 0."""

    accepted: str = "a list of paths, each a list of integers from 0"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, list | tuple) and all(
            isinstance(path, list | tuple) and path and all(map(Integer(0).accepts, path)) for path in value
        )

    def normalize(self, value: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """The lists as tuples."""
        return tuple(map(tuple, value))


@dataclass(frozen=True)
class Table:
    """Objects whose attributes have a table of their own: that of the configuration class named `of`."""

    of: str = ""
    accepted: str = "an object"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        return isinstance(value, Mapping)

    def normalize(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Json:
    """Values that JSON carries from one program to any other: finite numbers, integers of 53 bits, text in Unicode."""

    accepted: str = "a JSON value with finite numbers and integers of at most 53 bits"

    def accepts(self, value: object) -> bool:
        """Whether `value` is in the domain."""
        try:
            return self._carries(value)
        except RecursionError:
            return False

    def normalize(self, value: Any) -> Any:
        """The value itself."""
        return value

    def _carries(self, value: object) -> bool:
        if isinstance(value, Mapping):
            return all(isinstance(name, str) and _is_unicode(name) for name in value) and self._carries(
                [*value.values()]
            )
        if isinstance(value, list | tuple):
            return all(map(self._carries, value))
        if isinstance(value, str):
            return _is_unicode(value)
        if isinstance(value, float):
            return math.isfinite(value)
        return value is None or (isinstance(value, int) and abs(value) <= _MAX_SAFE_INT)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class Anything:
    """Every value: the domain of attributes that are accepted at their defaults only."""

    accepted: str = "any value"

    def accepts(self, value: object) -> bool:  # noqa: ARG002
        """Whether `value` is in the domain: always."""
        return True

    def normalize(self, value: Any) -> Any:
        """The value itself."""
        return value


#: Domains of the types that leave no bound open.
_BY_TYPE: Final[Mapping[Any, Domain]] = {
    bool: Flag(),
    str: Text(),
    tuple[str, ...]: TextList(),
    dict[str, str]: TextMap(),
}


def find_domain(kind: Any) -> Domain:
    """The domain that a type says by itself.

    Args:
        kind: Type of a field: a flag, text, texts, a `Literal` or a configuration class; or one of these or None.
    """
    if isinstance(kind, UnionType):
        (kind,) = set(get_args(kind)) - {type(None)}
    if get_origin(kind) is Literal:
        return Choice(get_args(kind))
    if isinstance(kind, type) and is_dataclass(kind):
        return Table(kind.__name__)
    return _BY_TYPE[kind]
