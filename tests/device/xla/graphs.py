"""Graphs that torch-xla has traced: what they consist of, and all that Neuron's compiler and tracer demand of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch_xla

from compiler_svc.lower.neuron.hlo import HloModule, read_hlo
from compiler_svc.lower.neuron.hlo_check import check_hlo
from compiler_svc.models.parameters import RANK
from targets.registry import TARGETS
from tests.device.xla.hlo import Instruction, parse

#: Types that Neuron's compiler takes without a thought. u8 holds truth values on their way to `and` and `or`.
TYPES: Final = {"f32", "bf16", "s32", "u8", "pred"}
#: What may have 64 bits: torch-xla's own lowerings of indexing compare each index with 0 in s64.
WIDE_OPS: Final = {"constant", "convert", "broadcast", "compare"}
#: Items of quantized weights and caches, which are moved and converted, and nothing else.
ITEM_TYPES: Final = {"s8", "f8e4m3fn", "f8e5m2"}
ITEM_OPS: Final = {
    "parameter",
    "transpose",
    "reshape",
    "broadcast",
    "convert",
    "slice",
    "gather",
    "scatter",
    "select",
    "tuple",
}
#: Operators of Neuron's compiler, and the types of the places that they give, which are converted at once.
CALLS: Final = {"AwsNeuronArgMax": "s64", "AwsNeuronTopK": "u32"}
#: Operations that no graph has; Neuron's compiler refuses them, or has none.
REFUSED_OPS: Final = {
    "sort",
    "while",
    "conditional",
    "rng",
    "rng-bit-generator",
    "call",
    "fft",
    "dynamic-reshape",
}
COLLECTIVES: Final = {"all-reduce", "all-gather"}
TARGET: Final = TARGETS["trn2"]

#: Graphs and instructions that `check_graph` has looked at in this process.
CHECKED: Final[Counter[str]] = Counter()


@dataclass(frozen=True)
class Graph:
    """A graph as text has it, and as the lowering for Neuron reads it.

    Attributes:
        unread: What it does not read, of all that it was given.
    """

    instructions: list[Instruction]
    module: HloModule
    unread: list[str]

    def list_collectives(self) -> list[tuple[object, ...]]:
        """What ranks must agree on: their exchanges, in the order in which they come."""
        return [
            (one.op, one.dtypes, one.sizes, one.replica_groups) for one in self.instructions if one.op in COLLECTIVES
        ]


def read_graph(results: Sequence[torch.Tensor], taken: Mapping[str, torch.Tensor]) -> Graph:
    """Reads the graph that computes tensors which have not been computed yet.

    Args:
        taken: What it was given, by name: inputs, state and weights.
    """
    read, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(list(results))
    unread = [name for name, tensor in taken.items() if torch_xla._XLAC._xla_get_tensor_id(tensor) not in read]
    module = read_hlo(torch_xla._XLAC._get_xla_tensors_hlo_proto(list(results)))
    return Graph(parse(torch_xla._XLAC._get_xla_tensors_hlo(list(results))), module, unread)


def check_graph(graph: Graph, state_sizes: Collection[int]) -> None:
    """Fails if Neuron's compiler would refuse the graph, or its tracer.

    Args:
        state_sizes: How many elements a tensor of the state has.
    """
    opcodes = Counter(
        op.opcode for computation in graph.module.computations.values() for op in computation.instructions.values()
    )
    # The check sees what is there.
    assert opcodes == Counter(one.op for one in graph.instructions)
    # A rank that returns all logits, and picks none, has no use for its number.
    assert [name for name in graph.unread if name != RANK] == []
    assert [str(one) for one in check_hlo(graph.module, target=TARGET.kind, memory_bytes=TARGET.core_bytes)] == []
    check_instructions(graph.instructions, state_sizes)
    CHECKED.update(graphs=1, instructions=opcodes.total())


def find_call(instruction: Instruction) -> str:
    """What a custom call calls."""
    (target,) = re.findall(r'custom_call_target="([^"]*)"', instruction.text)
    return target


def is_of_call(instruction: Instruction, dtype: str) -> bool:
    """Whether an instruction gives or takes apart what an operator of Neuron's compiler gives, of this type."""
    if instruction.op == "custom-call":
        return CALLS.get(find_call(instruction)) == dtype
    return instruction.op == "get-tuple-element" and dtype == CALLS["AwsNeuronTopK"]


def check_instructions(instructions: Sequence[Instruction], state_sizes: Collection[int]) -> None:
    """Fails if instructions break a rule that is ours, beside those of `compiler_svc.lower.neuron.hlo_check`."""
    broken = [
        instruction.text
        for instruction in instructions
        for dtype in instruction.dtypes
        if not (
            dtype in TYPES
            or (dtype == "s64" and instruction.op in WIDE_OPS)
            or (dtype in ITEM_TYPES and instruction.op in ITEM_OPS)
            or is_of_call(instruction, dtype)
        )
    ]
    assert broken == []

    def of(*ops: str) -> list[Instruction]:
        return [one for one in instructions if one.op in ops]

    # What has 64 bits is compared, and not narrowed: neuronx-cc 2.26 folds such casts into wrong results.
    places = [one for one in of("custom-call") if is_of_call(one, "s64")]
    narrowed = [one for one in of("convert") if "s64" in one.operand_dtypes and "s64" not in one.dtypes]
    assert len(narrowed) == len(places), [one.text for one in narrowed]
    assert [one.text for one in of(*REFUSED_OPS)] == []
    assert [one.text for one in instructions if "<=" in one.text.partition(" = ")[2].partition("(")[0]] == []
    assert [one.text for one in of("custom-call") if find_call(one) not in CALLS] == []
    assert [one.text for one in of("dot") if set(one.operand_dtypes) - {"f32", "bf16"}] == []
    assert [one.text for one in of("scatter") if one.dtypes[0] not in {"f32", "bf16", *ITEM_TYPES}] == []
    assert [one.text for one in of("all-reduce", "reduce-scatter") if set(one.dtypes) - {"f32", "bf16"}] == []
    assert [one.text for one in of("reduce-window") if len(one.operand_dtypes) != 2] == []
    # Of weights, which have two axes, some are as large as a cache.
    caches = [one for one in of("transpose") if one.num_elements in state_sizes and len(one.sizes) > 2]
    assert [one.text for one in caches if one.moves_axes] == []
