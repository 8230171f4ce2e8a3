"""What XLA demands of graphs, seen without it: all on the device of the inputs, int32 indices. See tests/device/xla."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bundle.abi.submodels import SubmodelName
from compiler_svc.trace.program import build_program, make_example_tensors
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.covering import cover
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling


class Watch(TorchDispatchMode):
    """Notes operations whose result is on the CPU, and those whose result has 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: set[str] = set()
        self.wide: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.on_cpu.add(str(func))
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int64, torch.float64):
                self.wide.add(str(func))
        return result


@pytest.mark.parametrize(
    "case",
    cover(
        {
            "submodel": ["context_encoding", "token_generation"],
            "padding_side": ["right", "left"],
            "tp_degree": [1, 2],
        }
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_graphs_stay_on_the_device_of_their_inputs(tiny: TinyModel, case: dict[str, Any]) -> None:
    check(tiny, sampling={"temperature": 0.0}, **case)


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("sampling", [{"dynamic": True}, {"top_p": 0.5, "deterministic": True}, {"top_k": 5}])
def test_sampling_stays_on_the_device_of_the_logits(sampling: dict[str, Any], tp_degree: int, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA["mha-bias-untied"] | {"num_hidden_layers": 1})
    check(tiny, "token_generation", sampling, tp_degree=tp_degree)


def check(tiny: TinyModel, submodel: SubmodelName, sampling: dict[str, Any], *, tp_degree: int, **changes: Any) -> None:
    changes |= {"sampling": make_sampling(**sampling), "tp_degree": tp_degree, "output_logits": tp_degree == 1}
    spec = tiny.spec(**changes)
    described = describe_submodel(spec, submodel, 64)
    program = build_program(spec, tiny.plan(tp_degree=tp_degree), described).to("meta")
    inputs = [tensor.to("meta") for tensor in make_example_tensors(spec, described)]
    with torch.no_grad(), Watch() as watch:
        program(*inputs)
    assert watch.on_cpu == set()
    assert watch.wide == set()
