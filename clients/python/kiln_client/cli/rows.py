"""Views for people, stated as rows: a title, the fields behind it, and their formats.

The text of a row is a template over one message. `{load.used_slots}` is a field by its path, and what follows a colon
is its format: one of `_FORMATS`, `yes/no` words of a flag, or one of Python's. An enum value is its name, a duration
its seconds, and repeated values are joined. `{bundle_version|bundle_ref}` is the first of the two that is not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kiln_client.enums import enum_name

#: Characters of a digest that tables show.
SHORT_DIGEST: Final = len("sha256:") + 12


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a description, or one column of a table. Its title and its text are templates.

    `needs` is the path of a field without which a description lacks the line, and a table's cell is empty.
    """

    title: str
    text: str | Callable[[Any], str]
    needs: str = ""


def describe(message: Any, rows: Sequence[Row], **more: object) -> Iterator[tuple[str, str]]:
    """Gives the titles and texts of one message; `more` has values besides its fields, by name."""
    return ((_fill(row.title, message, more), _text(row, message, more)) for row in rows if _has(message, row.needs))


def tabulate(messages: Collection[Any], columns: Sequence[Row], *, empty: str = "") -> RenderableType:
    """Makes a table of messages, one a line; if there are none, shows what `empty` says instead."""
    if empty and not messages:
        return Text(empty, style="dim")
    lines = (
        [_text(column, message, {}) if _has(message, column.needs) else "" for column in columns]
        for message in messages
    )
    return table([column.title for column in columns], lines)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """Makes a table of lines under a header."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in header:
        grid.add_column(title, overflow="fold")
    for line in lines:
        grid.add_row(*map(Text, line))
    return grid


def pairs(values: Iterable[tuple[str, object]]) -> Table:
    """Makes a table of names and values, one pair per line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values:
        grid.add_row(Text(name), Text(str(value)))
    return grid


def format_binary(size_bytes: int) -> str:
    """Formats a size in binary units."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def format_time(time: Timestamp) -> str:
    """Formats a time to the second, in UTC."""
    return f"{time.ToDatetime():%Y-%m-%d %H:%M:%S}"


_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "size": decimal,
    "binary": format_binary,
    "short": lambda digest: str(digest[:SHORT_DIGEST]),
    "time": format_time,
    "ms": lambda duration_s: f"{duration_s * 1e3:.1f} ms",
}


class _Template(Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[field_name] if field_name in kwargs else _read(args[0], field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            is_dense = format_spec == ","
            texts = (self.format_field(one, "" if is_dense else format_spec) for one in value)
            return ("," if is_dense else ", ").join(texts)
        if isinstance(value, bool) and format_spec:
            is_so, is_not = format_spec.split("/")
            return is_so if value else is_not
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        return format(value, format_spec)


def _fill(template: str, message: Any, more: Mapping[str, object]) -> str:
    return _Template().vformat(template, (message,), more)


def _text(row: Row, message: Any, more: Mapping[str, object]) -> str:
    return _fill(row.text, message, more) if isinstance(row.text, str) else row.text(message)


def _has(message: Any, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    holder = _read(message, owner) if owner else message
    if name and isinstance(holder, Message):
        field = _field(holder, name)
        if field.message_type is not None and not field.is_repeated:
            return holder.HasField(name)
    return not name or bool(_read(holder, name))


def _field(message: Message, name: str) -> FieldDescriptor:
    return cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])


def _read(message: Any, path: str) -> Any:
    """Reads what a path names; of a repeated message, a list of what it names in each."""
    name, _, rest = path.partition(".")
    if "|" in name:
        return next(filter(None, (_read(message, one) for one in name.split("|"))), "")
    value = getattr(message, name)
    if isinstance(message, Message):
        field = _field(message, name)
        if field.enum_type is not None:
            return enum_name(field.enum_type, value)
        if field.is_repeated:
            return [_read(one, rest) for one in value] if rest else [*value]
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    return _read(value, rest) if rest else value
