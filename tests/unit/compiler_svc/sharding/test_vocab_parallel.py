"""An embedding that ranks divide by tokens of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler_svc.models.registry import describe_model
from compiler_svc.models.transforms import split_vocabulary
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.parity.geometries import LLAMA_GEOMETRIES as GEOMETRIES
from tests.ranks.stepping import load_shard, run_exported
from tests.unit.compiler_svc.sharding.test_ranks import check_against_transformers, choose

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_shapes(tiny: TinyModel, tp_degree: int, *, is_split: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the embedding and of the head in the last rank's shard."""
    description = describe_model(tiny.checkpoint.config)
    plan = tiny.plan(tp_degree=tp_degree, description=split_vocabulary(description) if is_split else description)
    shard = load_shard(plan, tiny.checkpoint, rank=tp_degree - 1)
    return {name: tuple(shard[name].shape) for name in (EMBEDDING, HEAD) if name in shard}


@pytest.mark.parametrize(
    ("geometry", "tp_degree"), choose(["gqa2-tied-linear", "mha-bias-default"], [1, 2, 3], every=2)
)
def test_ranks_compute_what_transformers_computes(geometry: str, tp_degree: int, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES[geometry])
    description = split_vocabulary(describe_model(tiny.checkpoint.config))
    check_against_transformers(tiny, tp_degree, description=description)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "OPTForCausalLM", "BloomForCausalLM"])
def test_families_with_more_before_the_first_layer(architecture: str, tmp_path: Path) -> None:
    """Scaled embeddings, learned positions and projections, normalized embeddings."""
    *_, geometry = FAMILIES[architecture].geometries.values()
    tiny = write_tiny_model(tmp_path, geometry, architecture=architecture)
    description = split_vocabulary(describe_model(tiny.checkpoint.config))
    check_against_transformers(tiny, 2, description=description)


def test_exported_graphs_serve_every_rank(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa2-tied-linear"])
    description = split_vocabulary(describe_model(tiny.checkpoint.config))
    check_against_transformers(tiny, 2, run_exported, description=description)


def test_shards_hold_rows_and_a_tied_head_only_once(tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path / "tied", GEOMETRIES["gqa2-tied-linear"])
    untied = write_tiny_model(tmp_path / "untied", GEOMETRIES["mha-bias-default"])
    for tiny in (tied, untied):
        hidden = tiny.checkpoint.config["hidden_size"]
        assert read_shapes(tiny, 2, is_split=False) == {EMBEDDING: (211, hidden // 2), HEAD: (106, hidden)}
        head = {} if tiny is tied else {HEAD: (106, hidden)}
        assert read_shapes(tiny, 2, is_split=True) == {EMBEDDING: (106, hidden)} | head
