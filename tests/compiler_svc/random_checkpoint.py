"""Small random Llama checkpoints, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, VOCAB, LAYERS, HEADS, KV_HEADS = 32, 64, 96, 2, 4, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_checkpoint(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint; `changes` are made to `config.json`."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    save_file(_random_tensors(seed), path / "model.safetensors")
    return path


def _random_tensors(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                "mlp.up_proj": (INTERMEDIATE, HIDDEN),
                "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            }.items()
        }
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
