"""Small random Llama checkpoints, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

#: Loads, and makes no token of any text.
EMPTY_TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}


def write_checkpoint(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint; `changes` are made to `config.json`, and to nothing else."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (path / "tokenizer.json").write_text(json.dumps(EMPTY_TOKENIZER))
    save_file(random_tensors(CONFIG, seed), path / "model.safetensors")
    return path


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The tensors of a model with this `config.json`, by name."""
    random = np.random.default_rng(seed)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv_size, hidden),
                "self_attn.v_proj": (kv_size, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (intermediate, hidden),
                "mlp.up_proj": (intermediate, hidden),
                "mlp.down_proj": (hidden, intermediate),
            }.items()
        }
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
