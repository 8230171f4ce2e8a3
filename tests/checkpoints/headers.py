"""Checkpoints of real models' shapes that take no room on disk: headers, and weights that are holes in the files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compiler_svc.models.registry import describe_model

_LLAMA_3_1: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
}
#: What `config.json` of Llama 3.1 says.
LLAMA_8B: Final = _LLAMA_3_1 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B: Final = _LLAMA_3_1 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_70B_SHARDS: Final = 30
#: What `config.json` of Llama 3.2 1B says.
LLAMA_1B: Final = _LLAMA_3_1 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
#: An EAGLE draft of Llama 3.1 70B: one layer without its first norm, and `fc`, with the target's head copied in.
EAGLE_70B: Final = LLAMA_70B | {"num_hidden_layers": 1}
EAGLE_70B_SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "embed_tokens.weight": (128256, 8192),
    "fc.weight": (8192, 2 * 8192),
    "layers.0.self_attn.q_proj.weight": (8192, 8192),
    "layers.0.self_attn.k_proj.weight": (1024, 8192),
    "layers.0.self_attn.v_proj.weight": (1024, 8192),
    "layers.0.self_attn.o_proj.weight": (8192, 8192),
    "layers.0.mlp.gate_proj.weight": (28672, 8192),
    "layers.0.mlp.up_proj.weight": (28672, 8192),
    "layers.0.mlp.down_proj.weight": (8192, 28672),
    "layers.0.post_attention_layernorm.weight": (8192,),
    "lm_head.weight": (128256, 8192),
}


def write_headers(
    path: Path, config: dict[str, Any], *, num_shards: int = 4, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Path:
    """Writes a sharded bfloat16 checkpoint.

    Args:
        shapes: Of its tensors, by name; None for those that the configuration implies.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = list((shapes or describe_model(config).checkpoint_tensors()).items())
    weight_map = {}
    for number, part in enumerate((tensors[start::num_shards] for start in range(num_shards)), 1):
        name = f"model-{number:05}-of-{num_shards:05}.safetensors"
        _write_shard(path / name, dict(part))
        weight_map |= dict.fromkeys(dict(part), name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_sparse_checkpoint(path: Path) -> None:
    """Writes a model of one layer and half a gigabyte."""
    sizes = {"vocab_size": 32000, "intermediate_size": 8192, "num_hidden_layers": 1, "tie_word_embeddings": True}
    token_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    write_headers(path, LLAMA_8B | sizes | token_ids, num_shards=1)


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    offset, entries = 0, {}
    for name, shape in tensors.items():
        size_bytes = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + size_bytes)}
        offset += size_bytes
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)
