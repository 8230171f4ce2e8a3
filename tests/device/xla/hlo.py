"""Reads the text of an HLO module: what a graph computes, with what types."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Final

_INSTRUCTION: Final = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_SHAPE: Final = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<sizes>[^\]]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        dtypes: Of its results; several if it gives a tuple.
        sizes: The axes of its first result.
        operand_dtypes: Of what it takes.
        text: The whole line.
    """

    op: str
    dtypes: tuple[str, ...]
    sizes: tuple[str, ...]
    operand_dtypes: tuple[str, ...]
    text: str

    @property
    def num_elements(self) -> int:
        return prod(map(int, self.sizes))

    @property
    def replica_groups(self) -> str:
        """The ranks that a collective exchanges values among, as the text has them; empty for other operations."""
        groups = re.search(r"replica_groups=(\S+?),? ", f"{self.text} ")
        return groups[1] if groups else ""

    @property
    def moves_axes(self) -> bool:
        """Whether it is a transposition of more than axes of length 1."""
        order = re.search(r"dimensions=\{([\d,]*)\}", self.text)
        assert order is not None
        moved = [int(axis) for axis, size in zip(order[1].split(","), self.sizes, strict=True) if size != "1"]
        return moved != sorted(moved)


def parse(module: str) -> list[Instruction]:
    """The instructions of all computations."""
    instructions = []
    for line in module.splitlines():
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        results = _SHAPE.findall(found["type"])
        operands = _SHAPE.findall(found["rest"].partition("), ")[0])
        sizes = tuple(size for size in results[0][1].split(",") if size)
        dtypes = tuple(dtype for dtype, _ in results)
        instructions.append(
            Instruction(found["op"], dtypes, sizes, tuple(dtype for dtype, _ in operands), line.strip())
        )
    return instructions


def count(instructions: list[Instruction]) -> str:
    """Operations and result types with their numbers, in one line of text."""
    ops = Counter(instruction.op for instruction in instructions)
    dtypes = Counter(dtype for instruction in instructions for dtype in instruction.dtypes)
    return ", ".join(f"{name} {number}" for counted in (dtypes, ops) for name, number in sorted(counted.items()))
