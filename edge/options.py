"""What an option of a server is: a field of the class that holds its value.

`drain_timeout_s: float = option(SECONDS, "time for running calls at the end", default=10.0)` states one. From such
fields `edge.option_sources` makes the help, reads the values from the command line, the environment and a file, and
makes the object. A field that is a `section` holds an object of another such class.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypedDict, TypeVar, Unpack, dataclass_transform, overload

_Value = TypeVar("_Value")

#: Keys in the metadata of a field.
_ROW: Final = "option"
_SECTION: Final = "section"

_SIZE: Final = re.compile(r"([1-9][0-9]{0,15})(|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FLAGS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that an option takes, which `accepted` puts in words for messages.

    Attributes:
        parse: Makes the value of its text; raises ValueError or KeyError if the text is none.
        unit: Ends the names of attributes with such values, and not those of their options.
        separator: Stands between several values in the environment.
    """

    accepted: str
    metavar: str
    parse: Callable[[str], Any]
    unit: str = ""
    separator: str = os.pathsep


def one_of(*words: str, **values: Any) -> Domain:
    """Returns the domain of an option that takes one of several words, which stand for themselves or for `values`."""
    meanings = {**dict(zip(words, words, strict=True)), **values}
    return Domain(", ".join(meanings), "|".join(meanings), meanings.__getitem__)


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _parse_count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(text)
    return seconds


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _UNITS[match[2]]


def _parse_named_address(text: str) -> tuple[str, str]:
    name, _, address = text.rpartition("=")
    if ":" not in address:
        raise ValueError(text)
    return _parse_text(name), address


def _parse_key_place(text: str) -> str:
    if "://" in text and not re.match(r"https://[^/]", text):
        raise ValueError(text)
    return _parse_text(text)


FLAG: Final = Domain("true or false", "BOOL", _FLAGS.__getitem__)
TEXT: Final = Domain("text", "TEXT", _parse_text)
ADDRESS: Final = Domain("HOST:PORT", "HOST:PORT", _parse_text)
NAMED_ADDRESS: Final = Domain("NAME=HOST:PORT", "NAME=HOST:PORT", _parse_named_address, separator=",")
PATH: Final = Domain("a path", "PATH", lambda text: Path(_parse_text(text)))
#: Of this process for as long as it runs, whatever its directory becomes.
ABSOLUTE_PATH: Final = replace(PATH, parse=lambda text: Path(_parse_text(text)).absolute())
KEY_PLACE: Final = Domain("a path or an https URL", "PATH|URL", _parse_key_place)
COUNT: Final = Domain("an integer of at least 1", "N", _parse_count)
SECONDS: Final = Domain("a number above 0", "SECONDS", _parse_seconds, unit="_s")
DAYS: Final = Domain("a number above 0", "DAYS", _parse_seconds)
SIZE: Final = Domain("bytes, or an integer with KiB, MiB, GiB, TiB", "SIZE", _parse_size, unit="_bytes")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a server: on its command line, in its environment and in its file.

    Attributes:
        help: One phrase, without the default.
        name: As the file has it, such as `drain-timeout`.
        default_text: The default in words; empty if `default` says it.
        derive: Makes the default from the values before it in its class, if it follows from them or from the host.
        is_repeatable: Whether it takes several values; the value is then a tuple.
    """

    domain: Domain
    help: str
    name: str = ""
    default: Any = None
    default_text: str = ""
    derive: Callable[[Any], Any] | None = None
    is_required: bool = False
    is_repeatable: bool = False

    def describe_default(self) -> str:
        """Returns the default in words; empty if there is none."""
        if self.default_text or self.default is None or self.default == ():
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


class _Others(TypedDict, total=False):
    """Attributes of `Option` that a field may state beside."""

    name: str
    default_text: str
    is_required: bool
    is_repeatable: bool


@overload
def option(
    domain: Domain,
    words: str,
    *,
    default: _Value,
    derive: Callable[[Any], _Value] | None = None,
    **others: Unpack[_Others],
) -> _Value: ...
@overload
def option(domain: Domain, words: str, *, derive: Callable[[Any], _Value], **others: Unpack[_Others]) -> _Value: ...
@overload
def option(domain: Domain, words: str, **others: Unpack[_Others]) -> Any: ...
def option(
    domain: Domain, words: str, *, default: Any = MISSING, derive: Callable[[Any], Any] | None = None, **others: Any
) -> Any:
    """Makes a field that is an option, with `words` as its help. Without a default of either kind, it is required.

    Its name is the field's, with dashes and without the unit, unless `name` gives another one. See `Option` for the
    others. The constructor has the default, too, and nothing of what `derive` makes.
    """
    is_required = default is MISSING and derive is None
    row = Option(
        domain,
        words,
        default=None if default is MISSING else default,
        derive=derive,
        **{"is_required": is_required, **others},
    )
    return field(default=default, metadata={_ROW: row})


@overload
def section(kind: type, *, default: _Value) -> _Value: ...
@overload
def section(kind: type[_Value], *, default_factory: Callable[[], _Value]) -> _Value: ...
@overload
def section(kind: type[_Value]) -> _Value: ...
def section(kind: type, **default: Any) -> Any:
    """Makes a field that holds an object of another class with options, which stand here in the order of help."""
    return field(metadata={_SECTION: kind}, **default)


@dataclass_transform(frozen_default=True, field_specifiers=(option, section, field))
def option_class(*, slots: bool = False, kw_only: bool = False) -> Callable[[type[_Value]], type[_Value]]:
    """Makes a frozen dataclass of a class with options, whose required fields type checkers know."""
    return dataclass(frozen=True, slots=slots, kw_only=kw_only)


def list_options(kind: type) -> tuple[Option, ...]:
    """Lists the options of a class and its sections."""
    rows: list[Option] = []
    for one in fields(kind):
        if _SECTION in one.metadata:
            rows += list_options(one.metadata[_SECTION])
        elif _ROW in one.metadata:
            rows.append(_row_of(one))
    return tuple(rows)


def make(kind: type, values: Mapping[str, Any]) -> Any:
    """Makes an object of a class with options; its `from_options` checks what two options may not say together.

    An option whose name `values` leaves out has its default.
    """
    given: dict[str, Any] = {}
    for one in fields(kind):
        if _SECTION in one.metadata:
            given[one.name] = make(one.metadata[_SECTION], values)
        elif _ROW in one.metadata:
            row = _row_of(one)
            if row.name in values:
                given[one.name] = values[row.name]
            elif row.derive is not None:
                given[one.name] = row.derive(SimpleNamespace(**given))
            elif one.default is not MISSING:
                given[one.name] = one.default
    return getattr(kind, "from_options", kind)(**given)


def _row_of(one: Field[Any]) -> Option:
    row: Option = one.metadata[_ROW]
    return row if row.name else replace(row, name=one.name.removesuffix(row.domain.unit).replace("_", "-"))
