"""Checks the size of a request before it is parsed: many small parts take seconds and gigabytes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from google.protobuf.message import DecodeError

from edge.errors import RequestTooLarge
from edge.request_limit import RequestLimit

# Wire types, see https://protobuf.dev/programming-guides/encoding/#structure.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROUP_MARKS: Final = (3, 4)


async def check_size(data: bytes, descriptor: Any, limit: RequestLimit) -> None:
    """Checks a request that is not parsed yet; counts its fields in a thread."""
    if len(data) > limit.max_bytes:
        raise RequestTooLarge(len(data), limit.max_bytes, "bytes")
    num_fields = await asyncio.to_thread(count_fields, data, descriptor, limit.max_fields)
    if num_fields > limit.max_fields:
        raise RequestTooLarge(num_fields, limit.max_fields, "fields")


def count_fields(data: bytes, descriptor: Any, enough: int) -> int:
    """Counts the fields of a message and of those inside it, without parsing values; stops behind `enough`."""
    count = 0
    # Where messages that are still to be read begin and end, and their types.
    pending: list[tuple[int, int, Any]] = [(0, len(data), descriptor)]
    while pending and count <= enough:
        place, end, kind = pending.pop()
        while place < end and count <= enough:
            count += 1
            key, place = _read_varint(data, place)
            wire_type = key & 7
            if wire_type == _BYTES:
                length, start = _read_varint(data, place)
                place = start + length
                field = kind.fields_by_number.get(key >> 3)
                if field is not None and field.message_type is not None:
                    pending.append((start, place, field.message_type))
            elif wire_type == _VARINT:
                _, place = _read_varint(data, place)
            elif wire_type in (_FIXED32, _FIXED64):
                place += 4 if wire_type == _FIXED32 else 8
            elif wire_type not in _GROUP_MARKS:
                raise DecodeError(f"wire type {wire_type}")
            if place > end:
                raise DecodeError("a field ends behind its message")
    return count


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns the integer at `place`, and the place behind it."""
    value = shift = 0
    while True:
        if place >= len(data) or shift >= 70:
            raise DecodeError("an integer has no end")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
