"""Every family takes PEFT's adapters: each rank's part of base and adapter is its part of the merged model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.registry import describe_model
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.adapters import check_merged, fit, make_adapter, merge, with_room
from tests.checkpoints.nested_models import NESTED, write_nested_model
from tests.checkpoints.tiny_models import TinyModel


@dataclass(frozen=True)
class Merged:
    """An adapter of every module that adapters may change, and the checkpoint that it is merged into."""

    adapter: Path
    checkpoint: Checkpoint


@pytest.fixture(scope="module")
def merged(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    path = tmp_path_factory.mktemp("adapter")
    model = make_adapter(tiny, path, target_modules=list_targets(describe_model(tiny.checkpoint.config)))
    return Merged(path, merge(model, path / "merged"))


def list_targets(description: ModelDescription) -> list[str]:
    """The last parts of the names that modules of adaptable layers have in the checkpoint."""
    stored = {
        description.storage.find_name(piece.whole.tensor)
        for linear in description.linears()
        if linear.is_adaptable
        for piece in linear.list_stored("weight")
    }
    return sorted({name.split(".")[-2] for name in stored})


@pytest.mark.parametrize(("tp_degree", "fuses_qkv"), [(1, False), (2, True), (4, False)])
def test_ranks_hold_what_peft_merges(tiny: TinyModel, merged: Merged, tp_degree: int, fuses_qkv: bool) -> None:
    description = with_room(describe_model(tiny.checkpoint.config), fuses_qkv=fuses_qkv)
    fitted = fit(merged.adapter, description, tp_degree=tp_degree)
    check_merged(tiny, merged.checkpoint, fitted, description)


@pytest.mark.parametrize("architecture", NESTED)
def test_text_models_inside_of_others(architecture: str, tmp_path: Path) -> None:
    """PEFT names modules as transformers has them in memory, which the checkpoint calls otherwise."""
    tiny = write_nested_model(tmp_path / "model", architecture)
    model = make_adapter(tiny, tmp_path / "one", target_modules=r".*\.language_model\..*_proj")
    description = with_room(describe_model(tiny.checkpoint.config))
    check_merged(tiny, merge(model, tmp_path / "merged"), fit(tmp_path / "one", description, tp_degree=2), description)
