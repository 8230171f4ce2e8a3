"""Tensors of a Llama model: names and whole shapes of what a checkpoint holds and of what its configuration implies."""

from __future__ import annotations

import re
from typing import Final

from compiler_svc.models.llama_config import LlamaConfig
from compiler_svc.models.rope_config import LongRope

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"

#: Inverse frequencies of the rotary embedding, f32 [head_dim / 2]; the second set of LongRoPE.
ROPE_INV_FREQ: Final = "rope.inv_freq"
ROPE_LONG_INV_FREQ: Final = "rope.long_inv_freq"

#: Which rank a shard is for, int32 [1]; in shards of several ranks only.
RANK: Final = "rank_util.rank"

# Older checkpoints store what the configuration says already.
_REDUNDANT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def checkpoint_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the checkpoint must hold, by name."""
    hidden = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config).items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, hidden)
    return tensors


def derived_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 tensors that are computed from the configuration, by name."""
    names = (ROPE_INV_FREQ, ROPE_LONG_INV_FREQ) if isinstance(config.rope, LongRope) else (ROPE_INV_FREQ,)
    return dict.fromkeys(names, (config.head_dim // 2,))


def is_redundant(name: str, config: LlamaConfig) -> bool:
    """Whether a checkpoint may hold this tensor although the model does not take it."""
    return _REDUNDANT.fullmatch(name) is not None or (name == LM_HEAD and config.tie_word_embeddings)


def _layer_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for module, matrices, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
        for name, shape in matrices.items():
            tensors[f"{module}.{name}.weight"] = shape
            if bias:
                tensors[f"{module}.{name}.bias"] = shape[:1]
    tensors["post_attention_layernorm.weight"] = (hidden,)
    return tensors
