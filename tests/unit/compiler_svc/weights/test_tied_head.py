"""A tied head that the checkpoint stores all the same must be the embedding's table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tensors import check_tied_head
from tests.checkpoints.forms import FORMS, copy_in_form
from tests.checkpoints.random_weights import CONFIG, random_tensors, write_checkpoint

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
TENSORS = {name: torch.from_numpy(tensor) for name, tensor in random_tensors(CONFIG, 0).items()}


def store(path: Path, head: torch.Tensor, form: str = "safetensors") -> Checkpoint:
    original = write_checkpoint(path / "original")
    return Checkpoint.open(copy_in_form(original, path / form, form, TENSORS | {HEAD: head}))


@pytest.mark.parametrize("form", FORMS)
def test_the_table_stored_twice(tmp_path: Path, form: str) -> None:
    check_tied_head(store(tmp_path, TENSORS[TABLE].clone(), form), HEAD, TABLE)


def test_the_table_stored_once(tmp_path: Path) -> None:
    check_tied_head(Checkpoint.open(write_checkpoint(tmp_path / "tiny")), HEAD, TABLE)


@pytest.mark.parametrize("shape", [(96, 31), (95, 32), (1,)])
def test_a_matrix_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointInvalid, match="another matrix"):
        check_tied_head(store(tmp_path, torch.ones(shape)), HEAD, TABLE)
