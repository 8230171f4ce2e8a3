"""Reads HLO modules, as far as their check needs them. The numbers of the fields are those of `xla/service/hlo.proto`
and `xla/xla_data.proto` of OpenXLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from compiler_svc.lower.neuron.wire import (
    Fields,
    drop_fields,
    read_fields,
    read_integer,
    read_integers,
    read_message,
    read_messages,
    read_text,
)

#: Element types by their number, with the bits of an item; 0 for what is no array.
_TYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    13: ("tuple", 0),
    14: ("opaque", 0),
    15: ("c64", 64),
    16: ("bf16", 16),
    17: ("token", 0),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}

#: What says where operations come from, as `drop_fields` has it: the metadata of instructions, and a table of calls to
#: which they refer.
_SOURCES: Final = ((3, 2, 7), (17,))
#: How opcodes of operations on several ranks begin.
_COLLECTIVES: Final = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a value.

    Attributes:
        element_type: As HLO's text has it, such as `f32`; `tuple` for several values.
        dynamic: For each dimension whether its size may differ from call to call; empty if none may.
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    dynamic: tuple[bool, ...] = ()
    parts: tuple[Shape, ...] = ()

    def arrays(self) -> Iterator[Shape]:
        """Yields the shape itself, or those of a tuple's arrays."""
        if self.element_type != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(prod(one.dimensions) * _BITS.get(one.element_type, 0) // 8 for one in self.arrays())

    def __str__(self) -> str:
        if self.element_type == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"


_BITS: Final = dict(_TYPES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One operation.

    Attributes:
        operands: Ids of the instructions whose values it takes.
        called: Ids of the computations that it calls.
        parameter_number: Place of a parameter among those of its computation.
        target: What a custom call calls; empty for other operations.
        rng_algorithm: Of a generator of random bits; 0 is the default.
        u64s: Values of a constant of unsigned 64-bit integers.
        source_file: File that the operation comes from; empty if the module does not say.
        source_line: From 1; 0 if the module does not say.
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    parameter_number: int = 0
    target: str = ""
    rng_algorithm: int = 0
    u64s: tuple[int, ...] = ()
    source_file: str = ""
    source_line: int = 0


@dataclass(frozen=True, slots=True)
class Computation:
    """One function of a module; its instructions are by id, in an order in which operands come first."""

    instructions: Mapping[int, Instruction]
    root_id: int

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value it returns; None if the module lacks it."""
        return self.instructions.get(self.root_id)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters in their order."""
        found = (one for one in self.instructions.values() if one.opcode == "parameter")
        return tuple(sorted(found, key=lambda one: one.parameter_number))


@dataclass(frozen=True, slots=True)
class HloModule:
    """One graph; `aliases` has the entry's parameter for each output that takes its memory, by the output's place."""

    computations: Mapping[int, Computation]
    entry_id: int
    aliases: Mapping[int, int]

    @property
    def entry(self) -> Computation:
        """The computation that a caller calls."""
        return self.computations.get(self.entry_id, Computation({}, 0))

    @property
    def has_collectives(self) -> bool:
        """Whether an operation exchanges values with other ranks."""
        ops = (op for computation in self.computations.values() for op in computation.instructions.values())
        return any(op.opcode.startswith(_COLLECTIVES) for op in ops)


def read_hlo(data: bytes) -> HloModule:
    """Reads a serialized `HloModuleProto`."""
    module = read_fields(data)
    computations = {read_integer(one, 5): _read_computation(one) for one in read_messages(module, 3)}
    entries = read_messages(read_message(module, 8), 1)
    aliases = {(read_integers(one, 1) or (0,))[0]: read_integer(one, 2) for one in entries}
    return HloModule(computations, read_integer(module, 6), aliases)


def drop_sources(data: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` without the names, files and lines that its operations come from."""
    return drop_fields(data, _SOURCES)


def _read_computation(fields: Fields) -> Computation:
    instructions = [_read_instruction(one) for one in read_messages(fields, 2)]
    return Computation({one.id: one for one in instructions}, read_integer(fields, 6))


def _read_instruction(fields: Fields) -> Instruction:
    metadata = read_message(fields, 7)
    return Instruction(
        id=read_integer(fields, 35),
        name=read_text(fields, 1),
        opcode=read_text(fields, 2),
        shape=_read_shape(read_message(fields, 3)),
        operands=read_integers(fields, 36),
        called=read_integers(fields, 38),
        parameter_number=read_integer(fields, 9),
        target=read_text(fields, 28),
        rng_algorithm=read_integer(fields, 70),
        u64s=tuple(value % (1 << 64) for value in read_integers(read_message(fields, 8), 7)),
        source_file=read_text(metadata, 3),
        source_line=read_integer(metadata, 4),
    )


def _read_shape(fields: Fields) -> Shape:
    name, _ = _TYPES.get(read_integer(fields, 2), ("unknown", 0))
    return Shape(
        name,
        read_integers(fields, 3),
        tuple(map(bool, read_integers(fields, 6))),
        tuple(_read_shape(one) for one in read_messages(fields, 4)),
    )
