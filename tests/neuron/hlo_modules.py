"""Writes HLO modules as `HloModuleProto`, instruction by instruction, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: PrimitiveType of xla_data.proto.
TYPES = {
    "pred": 1, "s8": 2, "s16": 3, "s32": 4, "s64": 5, "u8": 6, "u32": 8, "u64": 9, "f16": 10, "f32": 11, "f64": 12,
    "tuple": 13, "c64": 15, "bf16": 16, "f8e5m2": 19, "f8e4m3fn": 20, "f8e4m3fnuz": 25,
}  # fmt: skip

#: Where every instruction comes from, beside its line.
SOURCE = b"aten__op"


def varint(value: int) -> bytes:
    value %= 1 << 64
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def number(place: int, value: int) -> bytes:
    return varint(place << 3) + varint(value)


def block(place: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(place << 3 | 2) + varint(len(data)) + data


def packed(place: int, values: Sequence[int]) -> bytes:
    return block(place, b"".join(map(varint, values))) if values else b""


@dataclass(frozen=True)
class Array:
    element_type: str
    dimensions: tuple[int, ...] = ()
    is_dynamic: bool = False

    def encode(self) -> bytes:
        dynamic = [1] * len(self.dimensions) if self.is_dynamic else []
        return number(2, TYPES[self.element_type]) + packed(3, self.dimensions) + packed(6, dynamic)


@dataclass(frozen=True)
class Op:
    """One instruction; its id is its place in its computation, from 1, plus 100 times the computation's id."""

    opcode: str
    shape: Array | tuple[Array, ...]
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    parameter: int = 0
    target: str = ""
    rng_algorithm: int = 0
    u64s: tuple[int, ...] = ()
    source: tuple[str, int] = ("", 0)

    def encode(self, identity: int) -> bytes:
        parts = self.shape if isinstance(self.shape, tuple) else ()
        shape = number(2, TYPES["tuple"]) + b"".join(block(4, part.encode()) for part in parts)
        if not isinstance(self.shape, tuple):
            shape = self.shape.encode()
        file, line = self.source
        return b"".join(
            (
                block(1, f"{self.opcode}.{identity}"),
                block(2, self.opcode),
                block(3, shape),
                block(7, block(1, SOURCE) + block(3, file) + number(4, line)),
                block(8, block(1, shape) + packed(7, self.u64s)),
                number(9, self.parameter),
                block(28, self.target),
                number(35, identity),
                packed(36, self.operands),
                b"".join(number(38, one) for one in self.called),
                # A map, which the reader passes over.
                block(68, block(1, block(1, "neff_input_names") + block(2, "input0"))),
                number(70, self.rng_algorithm),
            )
        )


@dataclass
class Module:
    """A module whose entry is the first computation; the root of each is its last instruction."""

    computations: list[list[Op]] = field(default_factory=list)
    #: Output → parameter.
    aliases: dict[int, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        encoded = []
        for place, ops in enumerate(self.computations, 1):
            first = 100 * place + 1
            instructions = b"".join(block(2, op.encode(first + index)) for index, op in enumerate(ops))
            encoded.append(
                block(1, f"computation.{place}") + instructions + number(5, place) + number(6, first + len(ops) - 1)
            )
        aliases = b"".join(
            block(1, packed(1, [output]) + number(2, parameter) + number(4, 2))
            for output, parameter in self.aliases.items()
        )
        # Callees come before their callers.
        return b"".join(
            (
                block(1, "SyncTensorsGraph"),
                block(2, "computation.1"),
                *(block(3, one) for one in reversed(encoded)),
                number(6, 1),
                block(8, aliases),
                # Calls that instructions come from.
                block(17, block(1, SOURCE)),
            )
        )
