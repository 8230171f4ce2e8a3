"""What graphs for XLA consist of: the rules of Neuron's compiler, and a record of each family's and option's graphs.

`python3.11 -m tests.device.xla -k recorded --write-records` writes the record anew. The commit that changes graphs
shows what it changes in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest

from bundle.abi.submodels import SubmodelName
from compiler_svc.lower.xla import register_operators
from compiler_svc.trace.submodels import describe_state, describe_submodel
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import write_tiny_model
from tests.device.xla.hlo import Instruction, count, parse
from tests.device.xla.models import FAMILIES
from tests.device.xla.traces import write_graph
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

RECORDS: Final = Path(__file__).parent / "graphs.txt"
COLLECTIVES: Final = {"all-reduce", "all-gather"}
SUBMODELS: Final[tuple[SubmodelName, ...]] = ("context_encoding", "token_generation")

GREEDY: Final = make_sampling(temperature=0.0)
DYNAMIC: Final = make_sampling(dynamic=True)
#: What options change in the graphs of one model.
OPTIONS: Final[Mapping[str, dict[str, Any]]] = {
    "logits": {"sampling": HOST_SAMPLING},
    "sampled": {"sampling": DYNAMIC},
    "top_p": {"sampling": make_sampling(top_p=0.7)},
    "left": {"padding_side": "left"},
    "blocks": {"num_blocks": 12, "block_tokens": 16},
    "bfloat16": {"dtype": "bfloat16"},
    "two-ranks": {"tp_degree": 2},
    "two-ranks-sampled": {"tp_degree": 2, "sampling": DYNAMIC},
}


@dataclass(frozen=True, kw_only=True)
class Graph:
    architecture: str
    attributes: dict[str, Any]
    options: dict[str, Any]
    submodel: SubmodelName

    @classmethod
    def list_all(cls) -> Iterator[Any]:
        models: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [(one.id, *one.values, {}) for one in FAMILIES]
        models += [(name, "LlamaForCausalLM", LLAMA["gqa-llama3-tied"], changes) for name, changes in OPTIONS.items()]
        for name, architecture, attributes, options in models:
            for submodel in SUBMODELS:
                graph = cls(architecture=architecture, attributes=attributes, options=options, submodel=submodel)
                yield pytest.param(graph, id=f"{name}-{submodel}")

    def write(self, path: Path, rank: int = 0) -> Written:
        """Writes the graph of a rank."""
        tiny = write_tiny_model(path, self.attributes, architecture=self.architecture)
        spec = tiny.spec(**({"sampling": GREEDY, "output_logits": False, "ctx_batch_size": 2} | self.options))
        plan = tiny.plan(tp_degree=spec.tp_degree, dtype=spec.dtype)
        submodel = describe_submodel(spec, self.submodel, 32)
        text, unread = write_graph(spec, plan, submodel, load_shard(plan, tiny.checkpoint, rank))
        return Written(parse(text), unread, {prod(tensor.shape) for tensor in describe_state(spec).tensors})


@dataclass(frozen=True)
class Written:
    """A graph's instructions, the inputs that it does not read, and how many elements its states have."""

    instructions: list[Instruction]
    unread: list[str]
    state_sizes: set[int]

    def of(self, *ops: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.op in ops]


@pytest.fixture(scope="module", autouse=True)
def collectives() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, register_operators():
        # Among one device, torch-xla leaves collectives out.
        patch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
        yield


#: Types that Neuron's compiler takes without a thought. u8 holds truth values on their way to `and` and `or`.
TYPES: Final = {"f32", "bf16", "s32", "u8", "pred"}
#: What may have 64 bits: torch-xla compares an index with a number in s64, and torch's argmax and top-k give s64, which
#: is converted at once. Such numbers are not added or sorted, and index nothing.
WIDE_OPS: Final = {"constant", "parameter", "convert", "broadcast", "reshape", "compare"}
#: Operations that no graph has; Neuron's compiler refuses them, or has none.
REFUSED_OPS: Final = {
    "custom-call",
    "while",
    "conditional",
    "rng",
    "rng-bit-generator",
    "call",
    "fft",
    "dynamic-reshape",
}


@pytest.mark.parametrize("graph", Graph.list_all())
def test_graphs_are_those_recorded(graph: Graph, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The rules hold, and each graph has the operations and types that its record has."""
    written = graph.write(tmp_path)
    assert written.unread == []
    check_rules(written)
    name, found = request.node.callspec.id, count(written.instructions)
    records = dict(line.split(": ", 1) for line in RECORDS.read_text().splitlines()) if RECORDS.exists() else {}
    if request.config.getoption("--write-records"):
        RECORDS.write_text("".join(f"{key}: {line}\n" for key, line in sorted((records | {name: found}).items())))
    else:
        assert found == records.get(name, "no record")


def check_rules(written: Written) -> None:
    broken = [
        instruction.text
        for instruction in written.instructions
        for dtype in instruction.dtypes
        if not (dtype in TYPES or (dtype == "s64" and instruction.op in WIDE_OPS))
    ]
    assert broken == []
    assert [one.text for one in written.of(*REFUSED_OPS)] == []
    assert [one.text for one in written.instructions if "<=" in one.text.partition(" = ")[2].partition("(")[0]] == []
    # Keys of sorts come first; the places behind them are s32.
    assert [one.text for one in written.of("sort") if one.operand_dtypes[0] not in ("f32", "bf16")] == []
    assert [one.text for one in written.of("dot") if set(one.operand_dtypes) - {"f32", "bf16"}] == []
    assert [one.text for one in written.of("scatter") if one.dtypes[0] not in ("f32", "bf16")] == []
    assert [one.text for one in written.of("all-reduce", "reduce-scatter") if set(one.dtypes) - {"f32", "bf16"}] == []
    assert [one.text for one in written.of("reduce-window") if len(one.operand_dtypes) != 2] == []
    moved = [one.text for one in written.of("transpose") if one.num_elements in written.state_sizes and one.moves_axes]
    assert moved == []


def test_every_record_has_its_graph() -> None:
    names = {line.partition(": ")[0] for line in RECORDS.read_text().splitlines()}
    assert names == {graph.id for graph in Graph.list_all()}


@pytest.mark.parametrize("options", ["two-ranks", "two-ranks-sampled"])
@pytest.mark.parametrize("submodel", SUBMODELS)
def test_ranks_call_the_same_collectives_in_the_same_order(
    options: str, submodel: SubmodelName, tmp_path: Path
) -> None:
    graph = Graph(
        architecture="LlamaForCausalLM",
        attributes=LLAMA["gqa-llama3-tied"],
        options=OPTIONS[options],
        submodel=submodel,
    )
    calls = [
        [(one.op, one.dtypes, one.sizes) for one in graph.write(tmp_path / str(rank), rank).of(*COLLECTIVES)]
        for rank in range(2)
    ]
    assert calls[0] == calls[1]
    assert {op for op, _, _ in calls[0]} == COLLECTIVES


def test_rules_can_be_broken() -> None:
    """By what graphs had before, and by what Neuron's compiler refuses."""
    for line in (
        "%a = s64[3]{0} add(s64[3]{0} %b, s64[3]{0} %c)",
        "%a = f64[] constant(1)",
        "%a = (s32[3]{0}, s32[3]{0}) sort(s32[3]{0} %b, s32[3]{0} %c), dimensions={0}, to_apply=%d",
        "%a = s32[3,3]{1,0} dot(s32[3,3]{1,0} %b, s32[3,3]{1,0} %c), lhs_contracting_dims={1}",
        "%a = s32[3]{0} all-reduce(s32[3]{0} %b), replica_groups={{0,1}}, to_apply=%c",
        "%a = f32[<=3]{0} add(f32[<=3]{0} %b, f32[<=3]{0} %c)",
        "%a = f32[2,4,3]{2,1,0} transpose(f32[4,2,3]{2,1,0} %b), dimensions={1,0,2}",
        '%a = f32[3]{0} custom-call(f32[3]{0} %b), custom_call_target="Other"',
        "%a = s32[5]{0} scatter(s32[5]{0} %b, s32[1]{0} %c, s32[1]{0} %d), to_apply=%e",
    ):
        instructions = parse(f"  {line}\n")
        assert len(instructions) == 1, line
        with pytest.raises(AssertionError):
            check_rules(Written(instructions, [], {24}))
