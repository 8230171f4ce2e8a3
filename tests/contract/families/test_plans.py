"""A plan of a compile knows every family: what each rank holds is what its shards will have."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from bundle.abi.tensor import DTYPES
from bundle.manifest import TargetKind
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.trace.submodels import describe_state
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TinyModel
from tests.unit.compiler_svc.planning.planning import open_planner, plan


@pytest.mark.parametrize(("target", "tp_degree"), [("cpu", 1), ("cpu", 2), ("trn2", 4)])
def test_a_plan_knows_the_memory_of_each_rank(
    tiny: TinyModel, tmp_path: Path, target: TargetKind, tp_degree: int
) -> None:
    path = tiny.checkpoint.path
    with open_planner(tmp_path, path.parent) as planner:
        planned = plan(
            planner, path.name, target, seq_len=64, tp_degree=tp_degree, torch_dtype="float32", max_context_length=32
        )
    assert planned.fits
    assert planned.num_ranks == tp_degree
    assert planned.memory.weights_bytes == make_plan(tiny.checkpoint, tp_degree=tp_degree).shard_size_bytes
    state = describe_state(plan_build(tiny.checkpoint, planned.config.neuron_config, target=target).model)
    assert planned.memory.kv_bytes == sum(prod(one.shape) * DTYPES[one.dtype].size_bytes for one in state.tensors)
