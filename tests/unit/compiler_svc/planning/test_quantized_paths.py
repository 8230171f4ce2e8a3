"""`quantized_checkpoints_path`: weights that come from another directory than configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from bundle.digest import sha256_file
from bundle.errors import KilnError
from compiler_svc.config import Resolution
from compiler_svc.planning.admission import admit_request, resolve_request
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.job_spec import open_checkpoint, read_spec, write_spec
from compiler_svc.weights.checkpoint import Checkpoint, compute_checkpoint_digest
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.ranks.stepping import load_shard
from tests.unit.compiler_svc.planning.planning import compile_request, request

FIELD: Final = "neuron_config.quantized_checkpoints_path"
UP: Final = "model.layers.0.mlp.up_proj"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model root with the plain `tiny`, and `small`, NxD's weights of other numbers, which have no `config.json`."""
    write_checkpoint(tmp_path / "tiny")
    write_checkpoint(tmp_path / "small", seed=1)
    WRITERS["nxd"].rewrite(tmp_path / "small")
    (tmp_path / "small" / "config.json").unlink()
    return tmp_path


def ask(**neuron_config: Any) -> dict[str, Any]:
    given = {"seq_len": 16, "quantized": True, "quantized_checkpoints_path": "small"}
    return {"neuron_config": given | neuron_config}


def take(root: Path, **neuron_config: Any) -> tuple[Checkpoint, Resolution]:
    return resolve_request(compile_request(document=ask(**neuron_config)), (root,), compiles=True)


def test_weights_of_the_path_are_compiled(root: Path) -> None:
    spec = admit_request(compile_request(document=ask(), optimization_level=0), (root,))
    checkpoint = open_checkpoint(read_spec(write_spec(spec)))
    neuron_config = spec.config.neuron_config
    # What the configuration leaves open, the weights say.
    assert (neuron_config.quantization_dtype, neuron_config.quantization_type) == ("int8", "per_channel_symmetric")
    assert neuron_config.modules_to_not_convert == ("lm_head",)
    assert not [warning for warning in spec.warnings if "lose by it" in warning]
    shard = load_shard(plan_build(checkpoint, neuron_config, target="cpu").weights, checkpoint)
    stored = load_file(root / "small" / "model.safetensors")
    assert torch.equal(shard[f"{UP}.weight"], torch.from_numpy(stored[f"{UP}.weight"]))
    assert torch.equal(shard[f"{UP}.scale"], torch.from_numpy(stored[f"{UP}.scale"])[:, 0])
    assert checkpoint.tokenizer_files[0].parent == root / "tiny"


def test_what_the_configuration_says_comes_first(root: Path) -> None:
    _, resolution = take(root, quantization_type="per_tensor_symmetric", modules_to_not_convert=["down_proj"])
    neuron_config = resolution.config.neuron_config
    assert neuron_config.quantization_type == "per_tensor_symmetric"
    assert neuron_config.modules_to_not_convert == ("down_proj",)


def test_the_model_s_weights_stay_unless_it_counts(root: Path) -> None:
    checkpoint, resolution = take(root, quantized=False)
    assert checkpoint.files == (root / "tiny" / "model.safetensors",)
    assert any(FIELD in warning and "ignored" in warning for warning in resolution.warnings)
    # Plans for Neuron have no size that depends on it, and examples of documents name paths of their own.
    fields = {"quantized": True, "quantized_checkpoints_path": "nowhere"}
    checkpoint, _ = resolve_request(request("tiny", "trn1", **fields), (root,))
    assert checkpoint.files == (root / "tiny" / "model.safetensors",)


def test_the_digest_covers_what_is_read(root: Path) -> None:
    def digest() -> str:
        return compute_checkpoint_digest(take(root)[0], sha256_file)

    digests = [digest()]
    file = root / "small" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, file)
    digests.append(digest())
    (root / "small" / "config.json").write_text(json.dumps({"note": 1}))
    digests.append(digest())
    assert len({*digests}) == 3


def keep_plain(root: Path) -> None:
    shutil.copyfile(root / "tiny" / "model.safetensors", root / "small" / "model.safetensors")


def shorten(root: Path) -> None:
    tensors = load_file(root / "small" / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(8, np.float32)
    save_file(tensors, root / "small" / "model.safetensors")


def name_method(root: Path) -> None:
    said = {"quantization_config": {"quant_method": "hqq"}}
    (root / "small" / "config.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("path", "change", "reason", "text"),
    [
        ("nowhere", None, "CHECKPOINT_NOT_FOUND", "no such directory"),
        ("../small", None, "PATH_OUTSIDE_MODEL_ROOTS", "a directory below"),
        ("small/model.safetensors", None, "QUANTIZED_CHECKPOINT_INVALID", "has no weights"),
        (
            "small",
            lambda root: (root / "small" / "model.safetensors").unlink(),
            "QUANTIZED_CHECKPOINT_INVALID",
            "has no weights",
        ),
        ("small", keep_plain, "QUANTIZED_CHECKPOINT_INVALID", "whose matrices are not quantized"),
        (
            "small",
            shorten,
            "QUANTIZED_CHECKPOINT_INVALID",
            r"model.norm.weight: got shape \[8\]; accepted: shape \[32\]",
        ),
        ("small", name_method, "QUANTIZED_CHECKPOINT_INVALID", "quantization_config.quant_method: got 'hqq'"),
    ],
)
def test_other_directories_are_refused(
    root: Path, path: str, change: Callable[[Path], object] | None, reason: str, text: str
) -> None:
    if change is not None:
        change(root)
    with pytest.raises(KilnError, match=text) as caught:
        take(root, quantized_checkpoints_path=path)
    assert caught.value.reason == reason
    assert [one.field for one in caught.value.violations] == [FIELD]
