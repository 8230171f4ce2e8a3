"""Domains of attribute values: which values an attribute takes, and in words what it takes.

Domains accept values of JSON's types and never convert them: `"8"`, `true` and `8.0` are no integers. The one exception
is an integer as a value of `number`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin

from compiler_svc.models.size_limits import MAX_INTEGER, MAX_POSITIONS

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


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Domain:
    """The values that an attribute takes; `accepted` says so in words.

    Attributes:
        accepts: Whether a value, never None, is in the domain.
        normalize: Gives an accepted value its one spelling.
        limits: The smallest and the largest, of a domain of numbers.
        table: Of objects whose attributes have a table of their own: the name of the configuration class.
    """

    accepted: str
    accepts: Callable[[object], bool]
    normalize: Callable[[Any], Any] = _keep
    limits: tuple[float, float] | None = None
    words: tuple[str, ...] = ()
    table: str = ""


def integer(smallest: int, largest: int = MAX_INTEGER) -> Domain:
    """Integers from `smallest` to `largest`, both included."""
    return Domain(
        f"an integer from {smallest} to {largest}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest,
        limits=(smallest, largest),
    )


def number(smallest: float, largest: float = math.inf, *, positive: bool = False) -> Domain:
    """Finite numbers from `smallest` to `largest`, `smallest` itself excluded if `positive`; floats when normalized."""

    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            given = float(value)
        except OverflowError:
            return False
        lower = given > smallest if positive else given >= smallest
        return math.isfinite(given) and lower and given <= largest

    accepted = "a finite number"
    if smallest > -math.inf:
        accepted += f" greater than {smallest:g}" if positive else f" at least {smallest:g}"
    if largest < math.inf:
        accepted += f" and at most {largest:g}"
    return Domain(accepted, accepts, float, limits=(float(smallest), float(largest)))


def choice(words: tuple[str, ...], *, prefix: str = "") -> Domain:
    """One of a few words; `prefix` may precede a word and means nothing."""

    def normalize(value: str) -> str:
        return value.removeprefix(prefix)

    return Domain(
        ", ".join(map(repr, words)),
        lambda value: isinstance(value, str) and normalize(value) in words,
        normalize,
        words=words,
    )


def table(class_name: str) -> Domain:
    """Objects whose attributes have the table of a configuration class."""
    return Domain("an object", lambda value: isinstance(value, Mapping), table=class_name)


#: Lengths in tokens.
LENGTH: Final = integer(1, MAX_POSITIONS)


def is_ascending(value: object) -> bool:
    """Whether a value is a list of lengths in tokens, each longer than the one before."""
    lengths = list(value) if isinstance(value, list | tuple) else None
    if lengths is None or not all(map(LENGTH.accepts, lengths)):
        return False
    return all(shorter < longer for shorter, longer in itertools.pairwise(lengths))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_text_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) <= MAX_TEXTS and all(map(_is_text, value))


def _is_text_map(value: object) -> bool:
    if not isinstance(value, Mapping) or len(value) > MAX_TEXTS:
        return False
    return all(map(_is_text, (*value, *value.values())))


def _is_class(value: object) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {"__module__", "__name__"} and all(map(_is_text, value.values()))
    return _is_text(value)


def _is_infinite(value: object) -> bool:
    # JSON has no infinity: protobuf writes it as text.
    return value in ("Infinity", "-Infinity") or (isinstance(value, float) and math.isinf(value))


def _are_paths(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(path, list | tuple) and path and all(map(integer(0).accepts, path)) for path in value
    )


def _carries(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_unicode(name) for name in value) and _carries([*value.values()])
    if isinstance(value, list | tuple):
        return all(map(_carries, value))
    if isinstance(value, str):
        return _is_unicode(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) <= _MAX_SAFE_INT)


def _is_json(value: object) -> bool:
    try:
        return _carries(value)
    except RecursionError:
        return False


FLAG: Final = Domain("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Domain("text that is not empty", _is_text)
TEXTS: Final = Domain(f"a list of at most {MAX_TEXTS} texts that are not empty", _is_text_list, tuple)
TEXT_MAP: Final = Domain(
    f"an object whose values are texts that are not empty, at most {MAX_TEXTS} of them", _is_text_map, dict
)
#: Python classes, as "module.Class" or as NxD Inference's files name them; "module.Class" when normalized.
CLASS: Final = Domain(
    'a class such as "module.Class"',
    _is_class,
    lambda value: value if isinstance(value, str) else f"{value['__module__']}.{value['__name__']}",
)
#: Numbers that values are clamped to. An infinite one limits nothing and becomes None.
LIMIT: Final = Domain(
    "a number, infinite for no limit",
    lambda value: _is_infinite(value) or number(-math.inf).accepts(value),
    lambda value: None if _is_infinite(value) else float(value),
)
#: Lists of lengths in tokens; an empty list stands for no list.
ASCENDING_LENGTHS: Final = Domain(
    f"a list of at most {MAX_BUCKETS} integers from 1 to {MAX_POSITIONS}, each larger than the one before",
    lambda value: isinstance(value, list | tuple) and len(value) <= MAX_BUCKETS and is_ascending(value),
    tuple,
)
#: Paths of a tree: lists of choices, each an index from 0.
PATHS: Final = Domain(
    "a list of paths, each a list of integers from 0", _are_paths, lambda value: tuple(map(tuple, value))
)
#: What JSON carries from one program to any other.
JSON: Final = Domain("a JSON value with finite numbers and integers of at most 53 bits", _is_json)
#: Of attributes that are accepted at their defaults only.
ANYTHING: Final = Domain("any value", lambda _: True)

#: Domains of the types that leave no bound open.
_BY_TYPE: Final[Mapping[Any, Domain]] = {bool: FLAG, str: TEXT, tuple[str, ...]: TEXTS, dict[str, str]: TEXT_MAP}


def find_domain(kind: Any) -> Domain:
    """The domain that the type of a field says by itself: a flag, text, texts, a `Literal`, a configuration class.

    Of a union with None, the other type decides.
    """
    if isinstance(kind, UnionType):
        (kind,) = set(get_args(kind)) - {type(None)}
    if get_origin(kind) is Literal:
        return choice(get_args(kind))
    if isinstance(kind, type) and is_dataclass(kind):
        return table(kind.__name__)
    return _BY_TYPE[kind]
