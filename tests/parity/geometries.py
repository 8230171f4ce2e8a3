"""The models that parity is shown for: every family; ratios of query to KV heads, heads that need padding, ropes."""

from __future__ import annotations

from typing import Any, Final

#: Sizes that no degree divides, so that vocabulary, feed-forward and hidden axes are padded somewhere.
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 211,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA: Final[dict[str, dict[str, Any]]] = {
    "mha-bias-default": {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gqa2-tied-linear": {
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
    },
    "gqa4-tied-llama3": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gqa8-untied-dynamic": {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        # Shorter than the sequences, so that the frequencies do change.
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    },
    # Six query heads on three KV heads: no degree but 1 and 3 divides the KV heads.
    "padded-gqa2-yarn": {
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 1.0,
        },
    },
    "padded-mha-longrope": {
        "hidden_size": 40,
        "intermediate_size": 66,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.4],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # Seven query heads to a KV head: each group is padded by one at tp 4.
    "padded-groups-bias": {
        "hidden_size": 56,
        "intermediate_size": 66,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # 54 hidden dimensions: the embedding is padded at tp 4.
    "mqa-odd-hidden": {
        "hidden_size": 54,
        "intermediate_size": 77,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "tie_word_embeddings": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

_FAMILIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": {
        # The window is shorter than the longest prompt.
        "mistral-window": {
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Qwen2ForCausalLM": {
        "qwen2-some-layers-slide": {
            "hidden_size": 72,
            "intermediate_size": 90,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Qwen3ForCausalLM": {
        "qwen3-head-dim-tied": {
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
    "Phi3ForCausalLM": {
        # The shortest of its prompts have the short factors, and all cross to the long ones.
        "phi3-longrope": {
            "hidden_size": 48,
            "intermediate_size": 66,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        },
    },
    "GraniteForCausalLM": {
        "granite-multipliers": {
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Olmo2ForCausalLM": {
        # Ranks hold copies of KV heads, and four of them heads of zeros.
        "olmo2-odd-heads": {
            "hidden_size": 72,
            "intermediate_size": 90,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "SmolLM3ForCausalLM": {
        "smollm3-some-layers-rotate": {
            "hidden_size": 54,
            "intermediate_size": 77,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Gemma2ForCausalLM": {
        "gemma2-capped": {
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Gemma3ForCausalLM": {
        "gemma3-two-ropes": {
            "hidden_size": 54,
            "intermediate_size": 77,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    },
    "Starcoder2ForCausalLM": {
        "starcoder2-window": {
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "GPTNeoXForCausalLM": {
        "gpt-neox-by-head": {
            "hidden_size": 72,
            "intermediate_size": 90,
            "num_attention_heads": 6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    },
    "GPT2LMHeadModel": {
        # As many positions as the longest sequence has tokens.
        "gpt2-learned-positions": {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "OPTForCausalLM": {
        "opt-projected": {
            "hidden_size": 64,
            "ffn_dim": 90,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 40,
            "do_layer_norm_before": False,
            "tie_word_embeddings": True,
            "init_std": 0.15,
        },
    },
    "GPTJForCausalLM": {
        "gptj-pairs": {
            "hidden_size": 60,
            "n_inner": 90,
            "num_attention_heads": 5,
            "rotary_dim": 8,
            "tie_word_embeddings": False,
        },
    },
    "BloomForCausalLM": {
        # Slopes of four heads, and two between them.
        "bloom-slopes": {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "tie_word_embeddings": True,
        },
    },
    "CohereForCausalLM": {
        "cohere-normed-heads": {
            "hidden_size": 72,
            "intermediate_size": 90,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "use_qk_norm": True,
            "logit_scale": 0.3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
}


def count_kv_heads(config: dict[str, Any]) -> int:
    """KV heads of a geometry."""
    count: int = config.get("num_key_value_heads", config["num_attention_heads"])
    return count


def find_rope_type(config: dict[str, Any]) -> str:
    """The kind of a geometry's rotary embedding; of layers that attend to all positions, if others have another.

    `none` if it names none.
    """
    rope: dict[str, Any] = config.get("rope_parameters", {"rope_type": "none"})
    kind: str = rope.get("full_attention", rope)["rope_type"]
    return kind


#: Hugging Face's name of the architecture, by the geometry's name.
ARCHITECTURES: Final[dict[str, str]] = {
    name: architecture for architecture, geometries in _FAMILIES.items() for name in geometries
}
#: Arguments of the architecture's configuration in transformers, by the geometry's name.
GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    name: _COMMON | shape for geometries in _FAMILIES.values() for name, shape in geometries.items()
}
#: Those of the Llama family.
LLAMA_GEOMETRIES: Final[dict[str, dict[str, Any]]] = {name: GEOMETRIES[name] for name in _LLAMA}
