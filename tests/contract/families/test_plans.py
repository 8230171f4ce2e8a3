"""A plan of a compile knows every family: what each rank holds is what its shards will have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TinyModel
from tests.unit.compiler_svc.planning.planning import open_planner, plan


@pytest.mark.parametrize(("target", "tp_degree"), [("cpu", 1), ("cpu", 2), ("trn2", 4)])
def test_a_plan_knows_the_weights_of_each_rank(tiny: TinyModel, tmp_path: Path, target: str, tp_degree: int) -> None:
    path = tiny.checkpoint.path
    with open_planner(tmp_path, path.parent) as planner:
        planned = plan(
            planner, path.name, target, seq_len=64, tp_degree=tp_degree, torch_dtype="float32", max_context_length=32
        )
    assert planned.fits
    assert planned.num_ranks == tp_degree
    assert planned.memory.weights_bytes == make_plan(tiny.checkpoint, tp_degree=tp_degree).shard_size_bytes
