"""Types of command-line values."""

from __future__ import annotations

from typing import Any, BinaryIO

import click
from google.protobuf.descriptor import EnumDescriptor

from kiln_client.documents import Document, parse_document
from kiln_client.enums import enum_names
from kiln_client.errors import DocumentInvalid

SECONDS = click.FloatRange(min=0, min_open=True)
DOCUMENT = click.File("rb")


class Integer(click.ParamType[int]):
    """An integer that the wire can carry; what it may mean is for the server to judge."""

    name = "integer"

    def __init__(self, least: int, most: int) -> None:
        self._range = click.IntRange(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Gives the integer."""
        return int(self._range.convert(value, param, ctx))


INT32 = Integer(-(2**31), 2**31 - 1)
UINT64 = Integer(0, 2**64 - 1)


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Integers with commas between them."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Gives the integers, each within 32 bits."""
        return tuple(INT32.convert(part.strip(), param, ctx) for part in value.split(","))


def enum_choice(enum: Any) -> click.Choice[str]:
    """Accepts the names of an enum's values."""
    descriptor: EnumDescriptor = enum.DESCRIPTOR
    return click.Choice(enum_names(descriptor))


def read_document(file: BinaryIO, *, reason: str, field: str) -> Document:
    """Reads a YAML or JSON file that the command line names, `-` being standard input.

    Raises:
        DocumentInvalid: The file is no text, or neither YAML nor JSON.
    """
    source = getattr(file, "name", "-")
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentInvalid(source, f"it is not UTF-8: {error}", reason=reason, field=field) from None
    return parse_document(text, source=source, reason=reason, field=field)
