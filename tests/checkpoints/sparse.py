"""A checkpoint of half a gigabyte that takes no room on disk: its weights are a hole in the file."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from compiler_svc.models.registry import describe_model


def write_sparse_checkpoint(path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    offset, entries = 0, {}
    for name, shape in describe_model(config).checkpoint_tensors().items():
        size_bytes = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + size_bytes)}
        offset += size_bytes
    header = json.dumps(entries).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)
