"""Checks graphs before neuronx-cc is called: it takes minutes, and names its reason in a log.

The rules are those of the compiler's error codes that show in a graph
(https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/), and one demand of the tracer that has
no code: a graph uses each of its inputs. `tensor_map` and `graph_tracer` check that buffers are aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from bundle.manifest import TargetKind
from compiler_svc.lower.neuron.flags import OLD_FLOAT8
from compiler_svc.lower.neuron.hlo import Computation, HloModule, Instruction, Shape
from targets.registry import TARGETS

_SIGNED: Final = frozenset({"s4", "s8", "s16", "s32", "s64"})
_UNSIGNED: Final = frozenset({"u4", "u8", "u16", "u32", "u64"})
_INTEGERS: Final = _SIGNED | _UNSIGNED
_WIDE_INTEGERS: Final = frozenset({"s32", "s64", "u32", "u64"})
_64_BITS: Final = frozenset({"s64", "u64"})
#: What only moves items of weights and caches, or makes them: if they are F8E4M3FN, `flags` has a flag for them, but
#: nothing computes with them.
_MOVING: Final = frozenset(
    {"parameter", "transpose", "reshape", "broadcast", "convert", "slice", "gather", "scatter", "select"}
)
_PASSING: Final = frozenset({"tuple", "get-tuple-element"})
#: Targets whose compiler has no sort.
_WITHOUT_SORT: Final = frozenset(kind for kind, target in TARGETS.items() if target.max_candidates is not None)
#: What Neuron's packages call their custom calls.
_CUSTOM_CALLS: Final = "AwsNeuron"
#: The folders whose lines a finding names. What is above them differs from host to host.
_OWN_FOLDERS: Final = ("compiler_svc/", "execution/")


@dataclass(frozen=True, slots=True)
class Place:
    """An operation, and the module around it."""

    op: Instruction
    operands: tuple[Shape, ...]
    called: tuple[Computation, ...]
    target: TargetKind

    @property
    def shapes(self) -> Iterator[Shape]:
        """Yields the shapes of the arrays that it computes; none if it only passes on what others do."""
        return iter(()) if self.op.opcode in _PASSING else self.op.shape.arrays()

    def returns(self, types: Collection[str]) -> bool:
        """Whether an array that it returns has one of these element types."""
        return any(shape.element_type in types for shape in self.shapes)

    def takes(self, types: Collection[str]) -> bool:
        """Whether its first operand has one of these element types."""
        return bool(self.operands) and self.operands[0].element_type in types

    @property
    def reduces(self) -> bool:
        """Whether it combines values, instead of taking the second of two."""
        roots = [one.root for one in self.called]
        return any(root is None or (root.opcode, root.parameter_number) != ("parameter", 1) for root in roots)


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason for which neuronx-cc refuses an operation."""

    code: str
    wanted: str
    breaks: Callable[[Place], bool]


def _is_top_k(place: Place) -> bool:
    return place.op.opcode in ("topk", "sort") or place.op.target in ("TopK", "AwsNeuronTopK")


RULES: Final = (
    Rule(
        "NCC_EMOD025",
        "sizes that are the same in every call",
        lambda place: any(any(shape.dynamic) for shape in place.shapes),
    ),
    Rule("NCC_ESPP004", "float32 or narrower", lambda place: place.returns({"f64"})),
    Rule("NCC_EVRF004", "real numbers", lambda place: place.returns({"c64", "c128"})),
    Rule(
        "NCC_EVRF005",
        "another 8-bit float",
        lambda place: place.returns({"f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2fnuz"}),
    ),
    Rule(
        "NCC_EVRF051",
        "F8E4M3 on this target",
        lambda place: place.target in OLD_FLOAT8 and place.op.opcode not in _MOVING and place.returns({"f8e4m3fn"}),
    ),
    Rule(
        "NCC_EVRF006",
        "the default algorithm",
        lambda place: place.op.opcode == "rng-bit-generator" and place.op.rng_algorithm != 0,
    ),
    Rule("NCC_EVRF013", "floating-point keys", lambda place: _is_top_k(place) and place.takes(_INTEGERS)),
    Rule(
        "NCC_EVRF015",
        f"a custom call of Neuron's own, whose name begins with {_CUSTOM_CALLS}",
        lambda place: place.op.opcode == "custom-call" and not place.op.target.startswith(_CUSTOM_CALLS),
    ),
    Rule(
        "NCC_EVRF016",
        "floating-point numbers, or a scatter that replaces what it finds",
        lambda place: place.op.opcode == "scatter" and place.reduces and place.takes(_INTEGERS | {"pred"}),
    ),
    Rule(
        "NCC_EVRF019",
        "two operands",
        lambda place: place.op.opcode == "reduce-window" and len(place.operands) != 2,
    ),
    Rule(
        "NCC_EVRF022",
        "a number of 32 bits",
        lambda place: place.op.opcode == "shift-right-arithmetic" and not place.takes({"s32", "u32", "f32"}),
    ),
    Rule(
        "NCC_EVRF029",
        "no sort, which the target's compiler does not have",
        lambda place: place.op.opcode == "sort" and place.target in _WITHOUT_SORT,
    ),
    Rule(
        "NCC_EVRF035",
        "floating-point numbers",
        lambda place: place.op.opcode == "dot" and place.takes(_WIDE_INTEGERS),
    ),
    Rule(
        "NCC_EVRF061",
        "floating-point numbers",
        lambda place: place.op.opcode in ("all-reduce", "all-reduce-start") and place.takes(_WIDE_INTEGERS),
    ),
    Rule(
        "NCC_EVRF062",
        "integers of 32 bits",
        lambda place: place.op.opcode == "power" and place.returns(_64_BITS),
    ),
    Rule(
        "NCC_EVRF063",
        "floating-point numbers",
        lambda place: place.op.opcode == "reduce-scatter" and place.takes(_WIDE_INTEGERS),
    ),
    Rule(
        "NCC_ESFH002",
        "a constant of 32 bits",
        lambda place: any(value >> 32 for value in place.op.u64s),
    ),
)

#: The code for tensors that exceed a core's memory.
OUT_OF_MEMORY: Final = "NCC_EVRF009"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that neuronx-cc would refuse.

    Attributes:
        code: The compiler's error code; empty for a demand of the tracer.
        operation: Opcode and name of the operation, with the shape that it returns.
        source: Our own line, such as `execution/sampling.py:80`; empty if the graph does not say.
    """

    code: str
    operation: str
    wanted: str
    source: str

    def __str__(self) -> str:
        code = f"{self.code}: " if self.code else ""
        place = f" at {self.source}" if self.source else ""
        return f"{code}{self.operation}{place}; accepted: {self.wanted}"


def check_hlo(module: HloModule, *, target: TargetKind, memory_bytes: int | None) -> tuple[Finding, ...]:
    """Lists what neuronx-cc would refuse in a graph, in the order of its operations. `memory_bytes` is the memory of
    one core, which holds all that the graph takes; None if it is not known.
    """
    findings = []
    for computation in module.computations.values():
        ops = computation.instructions
        for op in ops.values():
            operands = tuple(ops[one].shape for one in op.operands if one in ops)
            called = tuple(module.computations[one] for one in op.called if one in module.computations)
            place = Place(op, operands, called, target)
            findings += [_find(op, rule.code, rule.wanted) for rule in RULES if rule.breaks(place)]
    used = {operand for op in module.entry.instructions.values() for operand in op.operands}
    for parameter in module.entry.parameters:
        if parameter.id not in used | {module.entry.root_id}:
            findings.append(_find(parameter, "", "an input that the graph uses"))
    size_bytes = sum(one.shape.size_bytes for one in module.entry.parameters)
    if memory_bytes is not None and size_bytes > memory_bytes:
        inputs = f"weights, state and inputs of {size_bytes} bytes"
        findings.append(Finding(OUT_OF_MEMORY, inputs, f"at most the {memory_bytes} bytes of a core", ""))
    return tuple(findings)


def find_missing(noun: str, name: str) -> Finding:
    """Says that a graph does not take a tensor of its submodel."""
    return Finding("", f"{noun} {name} is missing", "each that the submodel has, and each is used", "")


def find_unaliased(name: str) -> Finding:
    """Says that a graph does not return what a buffer becomes."""
    return Finding("", f"buffer {name} is no alias", "an output for each buffer, which takes its memory", "")


def _find(op: Instruction, code: str, wanted: str) -> Finding:
    operation = f"{op.target or op.opcode} {op.name} of {op.shape}"
    return Finding(code, operation, wanted, _name_source(op))


def _name_source(op: Instruction) -> str:
    """Our own line: the path from the last folder of ours on."""
    places = [place for folder in _OWN_FOLDERS if (place := f"/{op.source_file}".rfind(f"/{folder}")) >= 0]
    return f"{op.source_file[max(places) :]}:{op.source_line}" if places else ""
