"""Reads messages of protocol buffers field by field, and leaves fields out, without their descriptions: the interpreter
that lowers for Neuron has these in several packages, which register them under one name, so another one of ours would
not load beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

#: A field's values in their order: numbers as they are encoded, everything else as bytes.
Fields = Mapping[int, Sequence[int | bytes]]


class MessageInvalid(ValueError):
    """Bytes that are no message of protocol buffers."""


def read_fields(data: bytes) -> Fields:
    """Reads the fields of a message, by number."""
    fields: dict[int, list[int | bytes]] = defaultdict(list)
    for number, value, _ in _split(data):
        fields[number].append(value)
    return fields


def drop_fields(data: bytes, paths: Collection[tuple[int, ...]]) -> bytes:
    """Returns a message without some fields. A path has the number of a field, behind those of the messages that it is
    in, outermost first.
    """
    kept = []
    for number, value, encoded in _split(data):
        below = [path[1:] for path in paths if path[0] == number]
        if () in below:
            continue
        if below and isinstance(value, bytes):
            inner = drop_fields(value, below)
            kept.append(_write_varint(number << 3 | 2) + _write_varint(len(inner)) + inner)
        else:
            kept.append(encoded)
    return b"".join(kept)


def _split(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Each field's number, value and encoding, in their order."""
    place = 0
    while place < len(data):
        start = place
        tag, place = _read_varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _read_varint(data, place)
            yield number, value, data[start:place]
            continue
        if kind == 2:
            size, place = _read_varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise MessageInvalid(f"wire type {kind} at byte {place}")
        if place + size > len(data):
            raise MessageInvalid(f"field {number} ends at byte {place + size} of {len(data)}")
        yield number, data[place : place + size], data[start : place + size]
        place += size


def read_message(fields: Fields, number: int) -> Fields:
    """Reads a field that is a message; an empty one if it is not there."""
    return read_fields(_last_bytes(fields, number))


def read_messages(fields: Fields, number: int) -> Iterator[Fields]:
    """Reads a repeated field of messages."""
    return (read_fields(value) for value in fields.get(number, ()) if isinstance(value, bytes))


def read_text(fields: Fields, number: int) -> str:
    """Reads a field that is text; empty if it is not there."""
    return _last_bytes(fields, number).decode(errors="replace")


def read_integer(fields: Fields, number: int) -> int:
    """Reads an integer with a sign; 0 if it is not there."""
    value = fields.get(number, (0,))[-1]
    return _signed(value) if isinstance(value, int) else 0


def read_integers(fields: Fields, number: int) -> tuple[int, ...]:
    """Reads a repeated field of integers with a sign, packed or not."""
    found: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            found.append(_signed(value))
            continue
        place = 0
        while place < len(value):
            one, place = _read_varint(value, place)
            found.append(_signed(one))
    return tuple(found)


def _last_bytes(fields: Fields, number: int) -> bytes:
    value = fields.get(number, (b"",))[-1]
    return value if isinstance(value, bytes) else b""


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise MessageInvalid("a number ends behind the last byte")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise MessageInvalid(f"a number of more than 10 bytes before byte {place}")


def _write_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
