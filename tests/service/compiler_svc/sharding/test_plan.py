from pathlib import Path
from typing import Any

import pytest

from compiler_svc.models.sources import Sliced, Stored, list_tensors
from compiler_svc.sharding.errors import ShardingNotServed
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model


def write(path: Path, geometry: str, **changes: Any) -> TinyModel:
    return write_tiny_model(path, GEOMETRIES[geometry] | changes)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_plan_covers_the_checkpoint_and_its_size(geometry: str, tmp_path: Path) -> None:
    tiny = write(tmp_path, geometry)
    plan = tiny.plan()
    stored = [name for tensor in plan.tensors for name in list_tensors(tensor.spec.source)]
    assert sorted(stored) == sorted(tiny.checkpoint.tensors)
    num_elements = sum(parameter.numel() for parameter in tiny.model.parameters())
    assert plan.shard_size_bytes == 4 * (num_elements + tiny.model.config.head_dim // 2)
    half = tiny.plan(dtype="bfloat16")
    assert half.shard_size_bytes == 2 * num_elements + 4 * (tiny.model.config.head_dim // 2)


def test_tied_head_is_cut_apart_for_several_ranks(tmp_path: Path) -> None:
    plan = write(tmp_path, "gqa-llama3-tied", vocab_size=212).plan(tp_degree=2)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name["lm_head.weight"].spec.source == Sliced(Stored("model.embed_tokens.weight"), 0, 212)
    assert by_name["lm_head.weight"].rank_shape == (106, 64)
    assert by_name["model.embed_tokens.weight"].rank_shape == (212, 32)


@pytest.mark.parametrize("tp_degree", [65, 2**31 - 1])
def test_degrees_that_leave_ranks_with_nothing(tmp_path: Path, tp_degree: int) -> None:
    tiny = write(tmp_path, "gqa-llama3-tied")
    with pytest.raises(ShardingNotServed, match="hidden_size 64; accepted: at most hidden_size, 64") as caught:
        tiny.plan(tp_degree=tp_degree)
    assert caught.value.violations[0].field == "neuron_config.tp_degree"


@pytest.mark.parametrize("attribute", ["intermediate_size", "vocab_size"])
def test_every_axis_must_have_something_for_every_rank(tmp_path: Path, attribute: str) -> None:
    tiny = write(tmp_path, "gqa-llama3-tied", **{attribute: 30})
    assert tiny.plan(tp_degree=30).tp_degree == 30
    with pytest.raises(ShardingNotServed, match=f"got 31 with {attribute} 30; accepted: at most {attribute}, 30"):
        tiny.plan(tp_degree=31)
