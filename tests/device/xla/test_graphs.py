"""What graphs for XLA consist of: rules of Neuron's compiler, the record of graphs, and what ranks call together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch_xla.core.xla_model import all_reduce

from bundle.abi.submodels import SubmodelName
from compiler_svc.lower import xla
from compiler_svc.lower.neuron.model_builder import OPERATORS
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import UNCHANGED, Adapters, ModelChanges, Quantization
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_state, describe_submodel, list_adapter_tensors
from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import write_tiny_model
from tests.device.xla.cases import BUCKETS, CASES, PICKS
from tests.device.xla.graphs import COLLECTIVES, Graph, check_graph, check_instructions
from tests.device.xla.hlo import parse
from tests.device.xla.models import FAMILIES
from tests.device.xla.records import Records, read_records
from tests.device.xla.traces import make_submodel, trace_graph
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

#: The model that options are shown with.
MODEL: Final = ("LlamaForCausalLM", LLAMA["gqa-llama3-tied"])
#: What options change in the graphs of one model.
OPTIONS: Final[Mapping[str, dict[str, Any]]] = {
    "logits": PICKS["logits"],
    "sampled": PICKS["sampled"],
    "top_p": {"sampling": make_sampling(top_p=0.7)},
    "left": {"padding_side": "left"},
    "blocks": {"num_blocks": 12, "block_tokens": 16},
    "bfloat16": {"dtype": "bfloat16"},
}
#: The same with quantized weights, by their formats.
QUANTIZED: Final[Mapping[str, dict[str, Any]]] = {
    "int8_per_tensor": {},
    "f8e4m3_per_channel": {"dtype": "bfloat16"},
}
#: The same with room for adapters.
ADAPTED: Final[Mapping[str, dict[str, Any]]] = {"adapters": {}, "adapters-bfloat16": {"dtype": "bfloat16"}}
ROOM: Final = ModelChanges(fuses_qkv=True, adapters=Adapters(slots=AdapterSlots(slots=3, rank=4)))


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """A submodel whose graph is traced, and not run."""

    name: str
    architecture: str
    attributes: dict[str, Any]
    options: dict[str, Any]
    submodel: SubmodelName
    bucket: int = 32
    model_changes: ModelChanges = UNCHANGED

    @classmethod
    def list_all(cls) -> list[Any]:
        """Graphs of the cases, of each family without logits, and of the options of one model."""
        cases = [
            cls(
                name=case.name_graph(f"{submodel}_{bucket}"),
                architecture=case.architecture,
                attributes=case.attributes,
                options={"output_logits": True} | case.changes,
                submodel=submodel,
                bucket=bucket,
            )
            for case in CASES
            for submodel, buckets in BUCKETS.items()
            for bucket in buckets
        ]
        families = cls._list((str(one.id), *one.values, {}) for one in FAMILIES)
        options = cls._list((name, *MODEL, changes) for name, changes in OPTIONS.items())
        quantized = [
            replace(one, model_changes=ModelChanges(quantization=Quantization(format=one.name.rpartition("-")[0])))
            for one in cls._list((name, *MODEL, changes) for name, changes in QUANTIZED.items())
        ]
        adapted = cls._list((name, *MODEL, changes) for name, changes in ADAPTED.items())
        return _name([*cases, *families, *options, *quantized, *(replace(one, model_changes=ROOM) for one in adapted)])

    @classmethod
    def list_ranks(cls) -> list[Any]:
        """Graphs of each family on two ranks, and of the ways to pick of one model."""
        families = cls._list((f"{one.id}-two-ranks", *one.values, {"tp_degree": 2}) for one in FAMILIES)
        picks = cls._list(
            (f"two-ranks-{name}", *MODEL, {"tp_degree": 2} | PICKS[name]) for name in ("sampled", "logits")
        )
        adapted = cls._list([("two-ranks-adapters", *MODEL, {"tp_degree": 2})])
        return _name([*families, *picks, *(replace(one, model_changes=ROOM) for one in adapted)])

    @classmethod
    def _list(cls, models: Iterable[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> list[GraphCase]:
        return [
            cls(
                name=f"{name}-{submodel}",
                architecture=architecture,
                attributes=attributes,
                options=options,
                submodel=submodel,
            )
            for name, architecture, attributes, options in models
            for submodel in BUCKETS
        ]

    def trace(self, path: Path, rank: int = 0, **operators: Callable[..., Any]) -> Graph:
        """Traces the graph of a rank, and checks it.

        Args:
            operators: In place of those that graphs for XLA have.
        """
        tiny = write_tiny_model(path, self.attributes, architecture=self.architecture)
        description = self.model_changes.apply(describe_model(tiny.checkpoint.config))
        own = {"output_logits": False, "ctx_batch_size": 2, "description": description}
        spec = tiny.spec(**(PICKS["greedy"] | own | self.options))
        plan = tiny.plan(tp_degree=spec.tp_degree, dtype=spec.dtype, description=description)
        described = describe_submodel(spec, self.submodel, self.bucket)
        made = make_submodel(tiny.checkpoint.config, spec, plan, described, changes=self.model_changes)
        with xla.register_operators(**OPERATORS["single"], **operators):
            graph = trace_graph(made, load_shard(plan, tiny.checkpoint, rank) | make_room(spec))
        check_graph(graph, {prod(tensor.shape) for tensor in describe_state(spec).tensors})
        return graph


def make_room(spec: GraphSpec) -> dict[str, torch.Tensor]:
    """A rank's empty slots."""
    tensors = list_adapter_tensors(spec)
    return {one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in tensors}


def _name(cases: list[GraphCase]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.fixture(scope="module", autouse=True)
def collectives() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Among one device, torch-xla leaves collectives out.
        patch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
        yield


@pytest.mark.parametrize("case", GraphCase.list_all())
def test_graphs_are_those_recorded(case: GraphCase, records: Records, tmp_path: Path) -> None:
    """The rules hold, and each graph has the operations and types that its record has."""
    records.check(case.name, case.trace(tmp_path))


def test_every_record_has_its_graph() -> None:
    names = [one.id for one in [*GraphCase.list_all(), *GraphCase.list_ranks()]]
    assert sorted(read_records()) == sorted(names)


@pytest.mark.parametrize("case", GraphCase.list_ranks())
def test_ranks_call_the_same_collectives_and_graphs_are_those_recorded(
    case: GraphCase, records: Records, tmp_path: Path
) -> None:
    """In the same order, of the same form, among the same ranks: XLA's CPU client cannot run two of them together."""
    graphs = [case.trace(tmp_path / str(rank), rank) for rank in range(2)]
    check_ranks(graphs)
    for graph in graphs:
        records.check(case.name, graph)


def check_ranks(graphs: list[Graph]) -> None:
    calls = [graph.list_collectives() for graph in graphs]
    assert calls[0] == calls[1]
    assert {call[0] for call in calls[0]} == COLLECTIVES
    assert {call[-1] for call in calls[0]} == {"{{0,1}}"}


@pytest.mark.parametrize(
    "own",
    [
        {"all_reduce": lambda tensor, _: tensor * 2},
        {"all_reduce": lambda tensor, _: all_reduce("sum", tensor, groups=[[1, 0]], pin_layout=False)},
        {"all_reduce": lambda tensor, degree: xla.all_reduce(xla.all_reduce(tensor, degree), degree)},
        {"all_gather": lambda tensor, degree: torch.cat([tensor] * degree, dim=-1)},
    ],
    ids=["no-sum", "other-groups", "one-more-sum", "no-gather"],
)
def test_a_rank_that_differs_is_found(own: dict[str, Any], tmp_path: Path) -> None:
    case: GraphCase = GraphCase.list_ranks()[0].values[0]
    right = case.trace(tmp_path / "right")
    wrong = case.trace(tmp_path / "wrong", 1, **own)
    with pytest.raises(AssertionError):
        check_ranks([right, wrong])


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
        "%a = s8[3]{0} add(s8[3]{0} %b, s8[3]{0} %c)",
        "%a = f32[3,3]{1,0} dot(f32[3,3]{1,0} %b, f8e5m2[3,3]{1,0} %c), lhs_contracting_dims={1}",
        '%a = f32[3]{0} custom-call(f32[3]{0} %b), custom_call_target="Other"',
        "%a = s32[5]{0} scatter(s32[5]{0} %b, s32[1]{0} %c, s32[1]{0} %d), to_apply=%e",
    ):
        instructions = parse(f"  {line}\n")
        assert len(instructions) == 1, line
        with pytest.raises(AssertionError):
            check_instructions(instructions, {24})
