"""The forms in which people have checkpoints on their disks: safetensors or pickles, in one file or in several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.index.json")
_NUM_SHARDS: Final = 3

Tensors = Mapping[str, torch.Tensor]


def _save(tensors: Tensors, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path)
    else:
        torch.save(dict(tensors), path)


def _write_single(directory: Path, name: str, tensors: Tensors) -> None:
    _save(tensors, directory / name)


def _write_sharded(directory: Path, name: str, tensors: Tensors) -> None:
    stem, suffix = name.rsplit(".", 1)
    weight_map = {}
    for number in range(_NUM_SHARDS):
        part = dict(list(tensors.items())[number::_NUM_SHARDS])
        file = f"{stem}-{number + 1:05}-of-{_NUM_SHARDS:05}.{suffix}"
        _save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


#: How each form writes tensors into a directory.
FORMS: Final[dict[str, Callable[[Path, Tensors], None]]] = {
    "safetensors": lambda path, tensors: _write_single(path, "model.safetensors", tensors),
    "sharded-safetensors": lambda path, tensors: _write_sharded(path, "model.safetensors", tensors),
    "pickle": lambda path, tensors: _write_single(path, "pytorch_model.bin", tensors),
    "sharded-pickle": lambda path, tensors: _write_sharded(path, "pytorch_model.bin", tensors),
}


def copy_in_form(checkpoint: Path, copy: Path, form: str, tensors: Tensors) -> Path:
    """Copies a checkpoint's directory, with these tensors in one of the forms instead of its own weights."""
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns(*_WEIGHTS))
    FORMS[form](copy, tensors)
    return copy
