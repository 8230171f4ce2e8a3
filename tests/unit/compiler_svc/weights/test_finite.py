"""Tensors with NaN or infinite values are named."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tensors import check_finite
from tests.checkpoints.random_weights import CONFIG, random_tensors, write_checkpoint


@pytest.mark.parametrize(
    ("value", "shown"), [(np.nan, "nan at [2, 3]"), (np.inf, "inf at [2, 3]"), (-np.inf, "-inf at [2, 3]")]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_invalid_number_is_named(tmp_path: Path, value: float, shown: str, dtype: type) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors(CONFIG, 0).items()}
    save_file(tensors, path / "model.safetensors")
    check_finite(Checkpoint.open(path))
    tensors["model.layers.1.self_attn.k_proj.weight"][2, 3] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointInvalid) as caught:
        check_finite(Checkpoint.open(path))
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("model.layers.1.self_attn.k_proj.weight", shown)


def test_integers_and_scalars_have_none(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    save_file({"a": np.zeros((2, 2), np.int32), "b": np.array(1.0, np.float32)}, path / "model.safetensors")
    check_finite(Checkpoint.open(path))
    save_file({"b": np.array(np.nan, np.float32)}, path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"b: got nan at \[\]"):
        check_finite(Checkpoint.open(path))
