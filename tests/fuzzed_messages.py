"""Requests that no client of ours sends: messages drawn from their descriptors, and bytes that are nearly such.

Messages are written as bytes and not through protobuf's classes, which refuse what a hostile client sends: text that is
no UTF-8, enum values that do not exist, several fields of a oneof, nesting beyond every limit.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.fuzzing import ODD_VALUES, break_bytes

#: Values of fields by name, such as the id of a deployment that exists.
Existing = Mapping[str, Sequence[str | int]]

INTEGERS: Final = (
    *(0, 1, 2, 3, 7, 127, 128, 255, 256, 1000, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1),
    *(-1, -2, -(2**31), -(2**63)),
)
NUMBERS: Final = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-45, 1e-300, 3.4e38, 1e308, math.inf, -math.inf, math.nan)
TEXTS: Final = (
    *(value.encode() for value in ODD_VALUES if isinstance(value, str) and "\ud800" not in value),
    *(b"a\0b", b"%s%n", b"'; DROP TABLE operations; --", b"${x}", b"{{ 9 ** 9 }}"),
    *(b"{}", b"[]", b"null", b"NaN", b"1e999", b"[" * 5000, b'{"a":' * 5000, b'{"neuron_config": null}', b"-" * 200),
)
#: Texts that are no UTF-8, which protobuf refuses.
MALFORMED: Final = (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80")
#: How many bytes a field has that is to be large, and how many elements a list has that is to be long.
LARGE_BYTES: Final = (5_000, 70_000, 300_000)
LONG_LISTS: Final = (100, 1_000, 10_000)
MAX_DEPTH: Final = 6
#: Levels of a message that holds itself.
DEEP: Final = (50, 99, 101, 1_000)

_FIXED: Final = {
    FieldDescriptor.TYPE_DOUBLE: ("<d", 1),
    FieldDescriptor.TYPE_FLOAT: ("<f", 5),
    FieldDescriptor.TYPE_FIXED64: ("<Q", 1),
    FieldDescriptor.TYPE_SFIXED64: ("<q", 1),
    FieldDescriptor.TYPE_FIXED32: ("<I", 5),
    FieldDescriptor.TYPE_SFIXED32: ("<i", 5),
}
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_VARINT, _SIZED = 0, 2


class MessageFuzzer:
    """Draws the requests of a call."""

    def __init__(self, choose: random.Random, existing: Existing) -> None:
        """Takes the generator of a run, and what exists at the server."""
        self._choose = choose
        self._existing = existing

    def draw(self, descriptor: Descriptor) -> bytes:
        """Draws a request: likely to be accepted, odd in every field, or one of these with its bytes changed."""
        choose = self._choose
        message = self.draw_likely(descriptor) if choose.random() < 0.5 else self.draw_odd(descriptor)
        match choose.randrange(5):
            case 0:
                return break_bytes(choose, message)
            case 1:
                return self._splice(message, self.draw_odd(descriptor))
            case _:
                return message

    def draw_likely(self, descriptor: Descriptor, depth: int = 0) -> bytes:
        """A message of what exists at the server and of small numbers, with few of its other fields."""
        return b"".join(
            self._likely_field(field, depth)
            for field in self._pick_fields(descriptor)
            if self._choose.random() < (0.9 if field.name in self._existing else 0.2)
        )

    def draw_odd(self, descriptor: Descriptor, depth: int = 0) -> bytes:
        """A message of limits, of what does not exist, and of what is no value at all."""
        choose = self._choose
        if depth == 0 and choose.random() < 0.02 and (cycle := find_cycle(descriptor)):
            return nest(cycle, choose.choice(DEEP), self.draw_likely(descriptor))
        fields = list(self._pick_fields(descriptor, honest=choose.random() < 0.9))
        share = choose.choice((0.1, 0.5, 1.0)) if len(fields) < 20 else choose.choice((0.02, 0.1, 0.3))
        message = b"".join(self._odd_field(field, depth) for field in fields if choose.random() < share)
        if choose.random() < 0.05:
            # A field that the message does not have.
            message += write_sized(choose.choice((77, 19_000, 2**29 - 1)), choose.choice(TEXTS))
        return message

    def _pick_fields(self, descriptor: Descriptor, *, honest: bool = True) -> Iterator[FieldDescriptor]:
        """The fields of a message, one of each oneof; all of them unless `honest`."""
        chosen = {oneof.name: self._choose.choice(oneof.fields) for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            if not honest or field.containing_oneof is None or chosen[field.containing_oneof.name] is field:
                yield field

    def _likely_field(self, field: FieldDescriptor, depth: int) -> bytes:
        choose = self._choose
        count = choose.choice((1, 1, 2, 3)) if field.is_repeated else 1
        if field.message_type is not None:
            if depth >= MAX_DEPTH:
                return b""
            return b"".join(
                write_sized(field.number, self.draw_likely(field.message_type, depth + 1)) for _ in range(count)
            )
        values: Sequence[Any] = self._existing.get(field.name, ())
        if not values:
            if field.enum_type is not None:
                values = [value.number for value in field.enum_type.values]
            elif field.type in _FLOATS:
                values = (0.0, 0.5, 1.0)
            else:
                values = ("a", "tiny", "1") if field.type in _TEXTS else (0, 1, 2, 3, 5)
        return b"".join(write_scalar(field, choose.choice(values)) for _ in range(count))

    def _odd_field(self, field: FieldDescriptor, depth: int) -> bytes:
        choose = self._choose
        count = 1
        if field.is_repeated:
            count = choose.choice(LONG_LISTS) if choose.random() < 0.02 else choose.randint(0, 3)
        if field.message_type is not None:
            if depth >= MAX_DEPTH:
                return b""
            one = write_sized(field.number, self.draw_odd(field.message_type, depth + 1))
            return one * min(count, LONG_LISTS[1] if len(one) < 100 else 3)
        if count in LONG_LISTS and field.type not in _TEXTS:
            return write_sized(field.number, write_value(field, self._odd_value(field)) * count)
        return b"".join(write_scalar(field, self._odd_value(field)) for _ in range(min(count, LONG_LISTS[1])))

    def _odd_value(self, field: FieldDescriptor) -> Any:
        choose = self._choose
        if (existing := self._existing.get(field.name)) and choose.random() < 0.5:
            return choose.choice(existing)
        if field.type in _TEXTS:
            if choose.random() < 0.01:
                return choose.choice((b"a", b"\0", "€".encode(), b"[", b" ")) * choose.choice(LARGE_BYTES)
            return choose.choice(MALFORMED if choose.random() < 0.01 else TEXTS)
        if field.enum_type is not None and choose.random() < 0.7:
            return choose.choice(field.enum_type.values).number
        return choose.choice(NUMBERS if field.type in _FLOATS else INTEGERS)

    def _splice(self, first: bytes, second: bytes) -> bytes:
        """The beginning of one message and the end of another one."""
        choose = self._choose
        return first[: choose.randint(0, len(first))] + second[choose.randint(0, len(second)) :]


def find_cycle(descriptor: Descriptor) -> list[FieldDescriptor] | None:
    """The fields that lead from a message to a message that holds itself, and from there round to it; None without."""

    def search(current: Descriptor, path: list[FieldDescriptor]) -> list[FieldDescriptor] | None:
        for field in current.fields:
            if field.message_type is None:
                continue
            if field.message_type in (descriptor, *(one.message_type for one in path)):
                return [*path, field]
            if (found := search(field.message_type, [*path, field])) is not None:
                return found
        return None

    return search(descriptor, [])


def nest(path: Sequence[FieldDescriptor], levels: int, message: bytes) -> bytes:
    """Wraps a message in the first fields of a path once, and in the fields that go round `levels` times."""
    last = path[-1].message_type
    start = next((i for i, field in enumerate(path) if field.containing_type is last), 0)
    for _ in range(levels):
        for field in reversed(path[start:]):
            message = write_sized(field.number, message)
    for field in reversed(path[:start]):
        message = write_sized(field.number, message)
    return message


def write_varint(value: int) -> bytes:
    """An integer of 64 bits as protobuf writes it."""
    value &= 2**64 - 1
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def write_tag(number: int, wire_type: int) -> bytes:
    return write_varint(number << 3 | wire_type)


def write_sized(number: int, data: bytes) -> bytes:
    return write_tag(number, _SIZED) + write_varint(len(data)) + data


def write_value(field: FieldDescriptor, value: float) -> bytes:
    """A number without its tag, cut to the bits of its type."""
    if field.type in _FIXED:
        layout = _FIXED[field.type][0]
        if field.type in _FLOATS:
            is_too_large = field.type == FieldDescriptor.TYPE_FLOAT and abs(value) > 3.4e38
            return struct.pack(layout, math.copysign(math.inf, value) if is_too_large else value)
        return struct.pack(layout.upper(), int(value) & (2 ** (8 * struct.calcsize(layout)) - 1))
    if field.type in (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64):
        return write_varint(int(value) << 1 ^ int(value) >> 63)
    return write_varint(int(value))


def write_scalar(field: FieldDescriptor, value: str | bytes | float) -> bytes:
    """A field that is no message, with its tag."""
    if isinstance(value, str):
        value = value.encode(errors="surrogatepass")
    if isinstance(value, bytes):
        return write_sized(field.number, value)
    return write_tag(field.number, _FIXED[field.type][1] if field.type in _FIXED else _VARINT) + write_value(
        field, value
    )
