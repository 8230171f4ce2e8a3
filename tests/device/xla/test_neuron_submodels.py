"""What Neuron's front ends trace, on an XLA device: named submodels, whose graphs our reader of HLO reads."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model
import torch_xla.debug.metrics

from compiler_svc.lower.neuron.hlo import HloModule, read_hlo
from compiler_svc.lower.neuron.hlo_check import check_hlo
from compiler_svc.lower.neuron.submodel import Submodel
from compiler_svc.lower.xla import register_operators
from compiler_svc.trace.named_submodel import make_named_submodel
from compiler_svc.trace.submodel_document import write_document
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, deviation, write_tiny_model
from tests.ranks.stepping import load_shard, run_eagerly
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

TOLERANCE: Final = 2e-5
SUBMODELS: Final = [("context_encoding", 16), ("token_generation", 32)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), GEOMETRIES["gqa-llama3-tied"])


def make(tiny: TinyModel, submodel: tuple[str, int], **changes: Any) -> Submodel:
    spec = tiny.spec(**changes)
    tensors = tiny.plan().describe_shard(0, None, 0).tensors
    document = write_document(
        tiny.checkpoint.config,
        spec,
        tensors,
        describe_submodel(spec, *submodel),
        fuses_qkv=False,  # type: ignore[arg-type]
    )
    made = make_named_submodel(document)
    made.module.load_state_dict(load_shard(tiny.plan(), tiny.checkpoint), strict=False)
    return made


@pytest.mark.parametrize("submodel", SUBMODELS, ids=lambda one: one[0])
@torch.no_grad()
def test_outputs_and_buffers(tiny: TinyModel, submodel: tuple[str, int]) -> None:
    made, device = make(tiny, submodel), torch_xla.device()
    inputs = {name: torch.ones_like(tensor) for name, tensor in made.examples.items()}
    state = [made.module.get_buffer(one.name).clone() for one in made.state]
    spec = tiny.spec()
    described = describe_submodel(spec, *submodel)  # type: ignore[arg-type]
    run = run_eagerly(spec, tiny.plan(), described, load_shard(tiny.plan(), tiny.checkpoint))
    expected = run(*inputs.values(), *state)
    torch_xla.debug.metrics.clear_all()
    module = made.module.to(device)
    outputs = module(**{name: tensor.to(device) for name, tensor in inputs.items()})
    results = [*outputs, *(module.get_buffer(one.name) for one in made.state)]
    graph = torch_xla._XLAC._get_xla_tensors_hlo(results)
    module_read = read_hlo(torch_xla._XLAC._get_xla_tensors_hlo_proto(results))
    torch_xla.core.xla_model.unlazy(results)
    assert [name for name in torch_xla.debug.metrics.counter_names() if name.startswith("aten::")] == []
    for result, wanted in zip(results, expected, strict=True):
        assert deviation(result.cpu(), wanted) < TOLERANCE
    assert count_opcodes(module_read) == Counter(re.findall(r"^ .* = .*? ([a-z][a-z-]*)\(", graph, re.MULTILINE))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": HOST_SAMPLING},
        {"sampling": make_sampling(temperature=0.0), "output_logits": False},
        {"sampling": make_sampling(dynamic=True), "output_logits": False},
    ],
    ids=["logits", "greedy", "sampled"],
)
@pytest.mark.parametrize("submodel", SUBMODELS, ids=lambda one: one[0])
@torch.no_grad()
def test_neuronx_cc_would_refuse_nothing_in_graphs(
    tiny: TinyModel, submodel: tuple[str, int], changes: dict[str, Any]
) -> None:
    with register_operators():
        made, device = make(tiny, submodel, **changes), torch_xla.device()
        module = made.module.to(device)
        outputs = module(**{name: torch.ones_like(tensor).to(device) for name, tensor in made.examples.items()})
        results = [*outputs, *(module.get_buffer(one.name) for one in made.state)]
        graph = read_hlo(torch_xla._XLAC._get_xla_tensors_hlo_proto(results))
    assert check_hlo(graph, target="trn2", memory_bytes=None) == ()


def count_opcodes(module: HloModule) -> Counter[str]:
    ops = (op for computation in module.computations.values() for op in computation.instructions.values())
    return Counter(op.opcode for op in ops)
