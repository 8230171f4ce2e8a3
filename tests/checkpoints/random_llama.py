"""A random checkpoint of a size that people have, with the tokenizer of the shipped models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

from tests.checkpoints.random_weights import CONFIG, random_tensors
from tests.repository import ROOT

_TINY = ROOT / "examples/models/kiln-tiny"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
#: The benchmark's shape, with the tied embeddings of `CONFIG` and a larger vocabulary.
_SHAPE = {
    "vocab_size": 48000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
}


def write_llama_150m(path: Path) -> Path:
    """Writes a Llama of 12 layers, 150 M parameters and 2048 positions, in float32: 600 MB."""
    path.mkdir(parents=True)
    tokens = {
        name: value
        for name, value in json.loads((_TINY / "config.json").read_text()).items()
        if name.endswith("_token_id")
    }
    config = CONFIG | _SHAPE | tokens
    (path / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER:
        shutil.copy(_TINY / name, path / name)
    # Smaller than those of the tiny models, so that twelve layers do not overflow.
    save_file({name: tensor * 0.1 for name, tensor in random_tensors(config, 0).items()}, path / "model.safetensors")
    return path
