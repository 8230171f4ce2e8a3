"""The models that each family is shown with: the first geometry of a family in `make test`, all in `make test-full`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import ROPES

_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_WHOLE: Final[dict[str, Any]] = {"hidden_size": 64, "num_attention_heads": 4}
_OPT: Final[dict[str, Any]] = {"hidden_size": 64, "ffn_dim": 90, "num_attention_heads": 4, "init_std": 0.15}

#: Attributes of the architecture's configuration in transformers, by geometry. Prompts have up to 64 tokens and
#: sequences up to 128: windows are shorter than both.
GEOMETRIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": {
        "window": _SMALL | {"sliding_window": 11},
        "no-window-head-dim": _SMALL | {"sliding_window": None, "head_dim": 20, "tie_word_embeddings": True},
        "short-window-odd-heads": _SMALL
        | {"num_attention_heads": 6, "hidden_size": 54, "head_dim": 12, "sliding_window": 2},
    },
    "Qwen2ForCausalLM": {
        "some-layers-slide": _SMALL | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        "tied": _SMALL | {"num_key_value_heads": 8, "tie_word_embeddings": True},
        "yarn-odd-heads": _SMALL
        | {"num_attention_heads": 6, "hidden_size": 72, "num_key_value_heads": 3, "rope_parameters": ROPES["yarn"]},
    },
    "Qwen3ForCausalLM": {
        "head-dim-tied": _SMALL | {"head_dim": 24, "tie_word_embeddings": True},
        "slides-with-bias": _SMALL
        | {
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "llama3-rope": _SMALL | {"head_dim": 16, "num_key_value_heads": 1, "rope_parameters": ROPES["llama3"]},
    },
    "Phi3ForCausalLM": {
        # Longer than the sequences: transformers computes a whole sequence beyond it with the long factors, and a cache
        # has keys of before. `tests/parity` crosses it step by step, in both.
        "longrope": _SMALL
        | {
            "original_max_position_embeddings": 200,
            "rope_parameters": ROPES["longrope"] | {"original_max_position_embeddings": 200},
        },
        "partly-rotated": _SMALL
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        "window-mha-tied": _SMALL | {"num_key_value_heads": 8, "sliding_window": 13, "tie_word_embeddings": True},
    },
    "GraniteForCausalLM": {
        "multipliers": _SMALL
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
        "bias-tied": _SMALL
        | {
            "num_key_value_heads": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.5,
            "tie_word_embeddings": True,
        },
        "yarn-odd-heads": _SMALL
        | {
            "num_attention_heads": 6,
            "hidden_size": 54,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "logits_scaling": 16.0,
            "rope_parameters": ROPES["yarn"],
        },
    },
    "Olmo2ForCausalLM": {
        # Two and four ranks hold copies of KV heads, and four hold heads of zeros.
        "odd-heads": _SMALL | {"num_attention_heads": 6, "hidden_size": 72, "num_key_value_heads": 3},
        "bias-tied": _SMALL | {"attention_bias": True, "tie_word_embeddings": True},
        "mqa-llama3": _SMALL | {"num_key_value_heads": 1, "rope_parameters": ROPES["llama3"]},
    },
    "SmolLM3ForCausalLM": {
        "some-layers-rotate": _SMALL
        | {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
        "every-fourth": _SMALL | {"num_hidden_layers": 4, "rope_parameters": ROPES["yarn"]},
        "none-rotates-bias": _SMALL | {"no_rope_layers": [0, 0], "attention_bias": True, "mlp_bias": True},
    },
    "Gemma2ForCausalLM": {
        "capped": _SMALL
        | {
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        "uncapped-bias": _SMALL
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attention_bias": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        "mqa-odd-heads": _SMALL
        | {
            "num_attention_heads": 6,
            "hidden_size": 54,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "hidden_activation": "gelu",
            "sliding_window": 5,
            "rope_parameters": ROPES["linear"],
        },
    },
    "Gemma3ForCausalLM": {
        "two-ropes": _SMALL
        | {
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": ROPES["linear"], "sliding_attention": ROPES["default"]},
            "tie_word_embeddings": True,
        },
        "all-slide-capped": _SMALL
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 20, "final_logit_softcapping": 4.0},
        "yarn-odd-heads-bias": _SMALL
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "hidden_size": 54,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["linear"]},
        },
    },
    "Starcoder2ForCausalLM": {
        "window-tied": _SMALL | {"sliding_window": 11, "tie_word_embeddings": True},
        "no-bias": _SMALL | {"use_bias": False, "norm_epsilon": 1e-3, "hidden_act": "gelu"},
        "yarn-odd-heads": _SMALL
        | {"num_attention_heads": 6, "hidden_size": 72, "num_key_value_heads": 3, "rope_parameters": ROPES["yarn"]},
    },
    "GPTNeoXForCausalLM": {
        "parallel": _WHOLE | {"intermediate_size": 90},
        "sequential-tied": _WHOLE
        | {
            "intermediate_size": 100,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        },
        "odd-heads-linear": {
            "hidden_size": 72,
            "intermediate_size": 66,
            "num_attention_heads": 6,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.5},
        },
    },
    "GPT2LMHeadModel": {
        "tied": {"n_embd": 64, "n_head": 8, "n_layer": 2, "max_position_embeddings": 128},
        "inner-untied": {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 90,
            "max_position_embeddings": 140,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
        },
        "odd-heads": {"n_embd": 54, "n_head": 3, "n_layer": 2, "max_position_embeddings": 128},
    },
    "OPTForCausalLM": {
        "tied": {**_OPT, "max_position_embeddings": 128},
        "norms-after-projected": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 40},
        "no-bias-odd-heads": _OPT
        | {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "_remove_final_layer_norm": True,
        },
    },
    "GPTJForCausalLM": {
        "partly-rotated": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "max_position_embeddings": 128},
        "whole-heads": {
            "n_embd": 64,
            "n_head": 8,
            "n_layer": 2,
            "rotary_dim": 8,
            "n_inner": 90,
            "max_position_embeddings": 256,
        },
        "odd-heads": {"n_embd": 60, "n_head": 5, "n_layer": 2, "rotary_dim": 4, "max_position_embeddings": 256},
    },
    "BloomForCausalLM": {
        "tied": {"hidden_size": 64, "n_head": 8, "n_layer": 2},
        "slopes-between-powers": {"hidden_size": 72, "n_head": 6, "n_layer": 2, "layer_norm_epsilon": 1e-3},
        "untied-odd-heads": {"hidden_size": 60, "n_head": 5, "n_layer": 2, "tie_word_embeddings": False},
    },
    "CohereForCausalLM": {
        "normed-heads": _SMALL | {"use_qk_norm": True, "tie_word_embeddings": True},
        "bias-scaled": _SMALL | {"attention_bias": True, "logit_scale": 0.3, "layer_norm_eps": 1e-3},
        "odd-heads-llama3": _SMALL
        | {
            "num_attention_heads": 6,
            "hidden_size": 72,
            "num_key_value_heads": 3,
            "use_qk_norm": True,
            "rope_parameters": ROPES["llama3"],
        },
    },
}


_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "OPTForCausalLM": ("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"),
    # The MLP is four times as wide as the hidden state.
    "GPT2LMHeadModel": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "GPTJForCausalLM": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "BloomForCausalLM": ("vocab_size", "hidden_size", "n_layer", "n_head"),
}


@dataclass(frozen=True)
class Geometry:
    """One model of a family."""

    architecture: str
    name: str

    @property
    def attributes(self) -> dict[str, Any]:
        return GEOMETRIES[self.architecture][self.name]

    @property
    def required(self) -> tuple[str, ...]:
        """The attributes that shape the weights, by their names in `config.json`."""
        return _REQUIRED.get(self.architecture, _REQUIRED[""])


def parameters() -> list[Any]:
    """The geometries as pytest parameters; those that `make test` leaves out are marked slow."""
    return [
        pytest.param(
            Geometry(architecture, name),
            id=f"{architecture.removesuffix('ForCausalLM')}-{name}",
            marks=[pytest.mark.slow] if number else [],
        )
        for architecture, geometries in GEOMETRIES.items()
        for number, name in enumerate(geometries)
    ]
