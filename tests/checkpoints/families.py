"""The models that each family is shown with, a record a family: contract suite, parity, XLA and fuzzing read it."""

from __future__ import annotations

from typing import Any, Final

from tests.checkpoints.ropes import ROPES
from tests.checkpoints.shown_family import Attributes, ShownFamily

_PLAIN: Final = ROPES["default"]
_FAST: Final = ROPES["default"] | {"rope_theta": 500_000.0}
_ONE_SLIDES: Final = ["sliding_attention", "full_attention"]
_BIASED: Final = {"attention_bias": True, "mlp_bias": True}
_MULTIPLIERS: Final = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
_GEMMA_HEADS: Final = {"head_dim": 20, "query_pre_attn_scalar": 24}
_GEMMA_OPTIONS: Final = (
    *("attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window"),
    "final_logit_softcapping",
)


def grouped(
    num_heads: int = 8, num_kv_heads: int = 2, *, hidden: int = 64, inner: int = 90, tied: bool = False, **own: Any
) -> Attributes:
    """A model whose query heads share KV heads."""
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": hidden}
    return sizes | {"intermediate_size": inner, "tie_word_embeddings": tied} | own


def odd(hidden: int = 72, num_kv_heads: int = 3, **own: Any) -> Attributes:
    """Six query heads: two and four ranks hold copies of three KV heads, and four hold heads of zeros."""
    return grouped(6, num_kv_heads, hidden=hidden, **own)


def _until(original: int, kind: str) -> Attributes:
    """A rotary embedding with another original length."""
    return ROPES[kind] | {"original_max_position_embeddings": original}


def _cap(scores: float | None, logits: float | None) -> Attributes:
    return {"attn_logit_softcapping": scores, "final_logit_softcapping": logits}


def _gpt(hidden: int, num_heads: int, **own: Any) -> Attributes:
    return {"n_embd": hidden, "n_head": num_heads, "n_layer": 2} | own


def _opt(hidden: int = 64, num_heads: int = 4, **own: Any) -> Attributes:
    return {"hidden_size": hidden, "ffn_dim": 90, "num_attention_heads": num_heads, "init_std": 0.15} | own


def _bloom(hidden: int, num_heads: int, **own: Any) -> Attributes:
    return {"hidden_size": hidden, "n_head": num_heads, "n_layer": 2} | own


def _neox(hidden: int, num_heads: int, inner: int, **own: Any) -> Attributes:
    return {"hidden_size": hidden, "num_attention_heads": num_heads, "intermediate_size": inner} | own


_GPT_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": None,
}
#: Cases of the contract suite that show windows, and positions of prompts that end their rows.
_RINGS: Final = "test_sequences_wrap_around_their_rings"
_LEFT: Final = "test_prompts_at_the_edges_of_buckets"

FAMILIES: Final[dict[str, ShownFamily]] = {
    "LlamaForCausalLM": ShownFamily(
        shows=None,
        geometries={
            "gqa-llama3-tied": grouped(inner=176, tied=True, rope_parameters=ROPES["llama3"]),
            "mha-bias-untied": grouped(
                4, 4, hidden=48, inner=100, **_BIASED, hidden_act="gelu_pytorch_tanh", rope_parameters=_PLAIN
            ),
            "mqa-head-dim-yarn": grouped(
                6, 1, hidden=72, inner=96, head_dim=20, rms_norm_eps=1e-5, rope_parameters=ROPES["yarn"]
            ),
        },
        parity={
            "mha-bias-default": grouped(4, 4, hidden=48, inner=100, **_BIASED, rope_parameters=_PLAIN),
            "gqa2-tied-linear": grouped(4, 2, tied=True, rope_parameters=ROPES["linear"]),
            "gqa4-tied-llama3": grouped(inner=176, tied=True, rope_parameters=_until(64, "llama3")),
            # Shorter than the sequences, so that the frequencies do change.
            "gqa8-untied-dynamic": grouped(
                8, 1, inner=112, max_position_embeddings=48, rope_parameters=ROPES["dynamic"]
            ),
            # No degree but 1 and 3 divides the KV heads.
            "padded-gqa2-yarn": odd(head_dim=16, rope_parameters=_until(32, "yarn")),
            "padded-mha-longrope": grouped(
                5, 5, hidden=40, inner=66, head_dim=8, tied=True, rope_parameters=_until(64, "longrope")
            ),
            # Seven query heads to a KV head: each group is padded by one at tp 4.
            "padded-groups-bias": grouped(
                14, 2, hidden=56, inner=66, head_dim=8, attention_bias=True, rope_parameters=_FAST
            ),
            # 54 hidden dimensions: the embedding is padded at tp 4.
            "mqa-odd-hidden": odd(
                54, 1, inner=77, head_dim=20, tied=True, mlp_bias=True, rms_norm_eps=1e-5, rope_parameters=_PLAIN
            ),
        },
        options=("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias"),
    ),
    "MistralForCausalLM": ShownFamily(
        shows=(_RINGS,),
        geometries={
            "window": grouped(sliding_window=11),
            "no-window-head-dim": grouped(sliding_window=None, head_dim=20, tied=True),
            "short-window-odd-heads": odd(54, 2, head_dim=12, sliding_window=2),
        },
        # The window is shorter than the longest prompt.
        parity={"mistral-window": grouped(inner=100, sliding_window=24, rope_parameters=_PLAIN)},
        options=("hidden_act",),
        may_lack=("sliding_window",),
    ),
    "Qwen2ForCausalLM": ShownFamily(
        shows=(_RINGS,),
        geometries={
            "some-layers-slide": grouped(use_sliding_window=True, sliding_window=9, max_window_layers=1),
            "tied": grouped(8, 8, tied=True),
            "yarn-odd-heads": odd(rope_parameters=ROPES["yarn"]),
        },
        parity={
            "qwen2-some-layers-slide": odd(
                use_sliding_window=True, sliding_window=20, max_window_layers=1, rope_parameters=_PLAIN
            )
        },
        options=("use_sliding_window", "sliding_window", "max_window_layers"),
    ),
    "Qwen3ForCausalLM": ShownFamily(
        geometries={
            "head-dim-tied": grouped(head_dim=24, tied=True),
            "slides-with-bias": grouped(
                head_dim=10, attention_bias=True, use_sliding_window=True, sliding_window=20, layer_types=_ONE_SLIDES
            ),
            "llama3-rope": grouped(8, 1, head_dim=16, rope_parameters=ROPES["llama3"]),
        },
        parity={
            "qwen3-head-dim-tied": grouped(
                8, 1, inner=112, head_dim=20, tied=True, rope_parameters=_PLAIN | {"rope_theta": 1_000_000.0}
            )
        },
        options=("attention_bias", "sliding_window", "layer_types"),
        fixed={"use_sliding_window": True},
        heads="fixed",
    ),
    "Phi3ForCausalLM": ShownFamily(
        geometries={
            # Longer than the sequences: transformers computes a whole sequence beyond it with the long factors, and a
            # cache has keys of before. `tests/parity` crosses it step by step, in both.
            "longrope": grouped(original_max_position_embeddings=200, rope_parameters=_until(200, "longrope")),
            "partly-rotated": grouped(rope_parameters=_PLAIN | {"partial_rotary_factor": 0.5}),
            "window-mha-tied": grouped(8, 8, sliding_window=13, tied=True),
        },
        # The shortest of its prompts have the short factors, and all cross to the long ones.
        parity={
            "phi3-longrope": grouped(4, 2, hidden=48, inner=66, original_max_position_embeddings=24)
            | {
                "rope_parameters": ROPES["longrope"]
                | {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}
            }
        },
        options=("hidden_act",),
        may_lack=("sliding_window",),
        # transformers measures its factors by the hidden size, and takes no other kinds for it.
        heads="derived",
        rope="share",
        rope_kinds=("default", "longrope"),
    ),
    "GraniteForCausalLM": ShownFamily(
        geometries={
            "multipliers": grouped(**_MULTIPLIERS),
            "bias-tied": grouped(8, 8, **_BIASED, attention_multiplier=0.5, tied=True),
            "yarn-odd-heads": odd(54, head_dim=12, logits_scaling=16.0, rope_parameters=ROPES["yarn"]),
        },
        parity={"granite-multipliers": grouped(tied=True, **_MULTIPLIERS, rope_parameters=_PLAIN)},
        options=("attention_bias", "mlp_bias", *_MULTIPLIERS),
    ),
    "Olmo2ForCausalLM": ShownFamily(
        geometries={
            "odd-heads": odd(),
            "bias-tied": grouped(attention_bias=True, tied=True),
            "mqa-llama3": grouped(8, 1, rope_parameters=ROPES["llama3"]),
        },
        parity={"olmo2-odd-heads": odd(rope_parameters=_FAST)},
        options=("attention_bias", "rms_norm_eps", "hidden_act"),
    ),
    "SmolLM3ForCausalLM": ShownFamily(
        shows=(_RINGS,),
        geometries={
            "some-layers-rotate": grouped(no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=9, tied=True),
            "every-fourth": grouped(num_hidden_layers=4, rope_parameters=ROPES["yarn"]),
            "none-rotates-bias": grouped(no_rope_layers=[0, 0], **_BIASED),
            # Executables take the lengths of prompts all the same.
            "none-rotates-dynamic": grouped(no_rope_layers=[0, 0], rope_parameters=ROPES["dynamic"]),
        },
        parity={
            "smollm3-some-layers-rotate": odd(54, 1, inner=77, head_dim=12, tied=True, rope_parameters=_PLAIN)
            | {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 20}
        },
        options=(*("attention_bias", "mlp_bias", "no_rope_layer_interval", "use_sliding_window", "sliding_window"),),
        may_lack=("no_rope_layers",),
    ),
    "Gemma2ForCausalLM": ShownFamily(
        shows=(_RINGS,),
        geometries={
            "capped": grouped(**_GEMMA_HEADS, sliding_window=11, **_cap(2.0, 5.0), tied=True),
            "uncapped-bias": grouped(
                head_dim=16,
                query_pre_attn_scalar=16,
                attention_bias=True,
                sliding_window=20,
                layer_types=_ONE_SLIDES[::-1],
                **_cap(None, None),
            ),
            "mqa-odd-heads": odd(
                54, 1, head_dim=12, hidden_activation="gelu", sliding_window=5, rope_parameters=ROPES["linear"]
            ),
        },
        parity={
            "gemma2-capped": grouped(
                tied=True, **_GEMMA_HEADS, sliding_window=20, **_cap(2.0, 5.0), rope_parameters=_PLAIN
            )
        },
        options=(*_GEMMA_OPTIONS, "attn_logit_softcapping"),
        may_lack=("layer_types",),
        heads="fixed",
    ),
    "Gemma3ForCausalLM": ShownFamily(
        shows=None,
        geometries={
            "two-ropes": grouped(
                **_GEMMA_HEADS,
                sliding_window=11,
                layer_types=_ONE_SLIDES,
                rope_parameters={"full_attention": ROPES["linear"], "sliding_attention": _PLAIN},
                tied=True,
            ),
            "all-slide-capped": grouped(
                head_dim=8, query_pre_attn_scalar=8, sliding_window=20, final_logit_softcapping=4.0
            ),
            "yarn-odd-heads-bias": odd(
                54,
                num_hidden_layers=3,
                head_dim=12,
                attention_bias=True,
                sliding_window=5,
                layer_types=[*_ONE_SLIDES, "sliding_attention"],
                rope_parameters={"full_attention": ROPES["yarn"], "sliding_attention": ROPES["linear"]},
            ),
        },
        parity={
            "gemma3-two-ropes": odd(
                54, 1, inner=77, head_dim=16, query_pre_attn_scalar=16, tied=True, sliding_window=20
            )
            | {
                "layer_types": _ONE_SLIDES,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                    "sliding_attention": _PLAIN,
                },
            }
        },
        options=(*_GEMMA_OPTIONS, "sliding_window_pattern"),
        may_lack=("layer_types",),
        heads="fixed",
        rope="by_layer",
    ),
    "Starcoder2ForCausalLM": ShownFamily(
        shows=(_RINGS,),
        geometries={
            "window-tied": grouped(sliding_window=11, tied=True),
            "no-bias": grouped(use_bias=False, norm_epsilon=1e-3, hidden_act="gelu"),
            "yarn-odd-heads": odd(rope_parameters=ROPES["yarn"]),
        },
        parity={"starcoder2-window": grouped(tied=True, sliding_window=24, rope_parameters=_PLAIN)},
        options=("use_bias", "norm_epsilon", "hidden_act"),
        may_lack=("sliding_window",),
    ),
    "GPTNeoXForCausalLM": ShownFamily(
        shows=None,
        geometries={
            "parallel": _neox(64, 4, 90),
            "sequential-tied": _neox(64, 4, 100, hidden_act="gelu_fast", tie_word_embeddings=True)
            | {"use_parallel_residual": False, "attention_bias": False},
            "odd-heads-linear": _neox(72, 6, 66, rope_parameters=ROPES["linear"] | {"partial_rotary_factor": 0.5}),
        },
        parity={
            "gpt-neox-by-head": _neox(
                72, 6, 90, tie_word_embeddings=False, rope_parameters=_PLAIN | {"partial_rotary_factor": 0.5}
            )
        },
        options=("attention_bias", "use_parallel_residual", "hidden_act", "layer_norm_eps"),
        heads="equal",
        rope="share",
    ),
    "GPT2LMHeadModel": ShownFamily(
        shows=(_LEFT,),
        geometries={
            "tied": _gpt(64, 8, max_position_embeddings=128),
            "inner-untied": _gpt(64, 4, n_inner=90, max_position_embeddings=140, tie_word_embeddings=False)
            | {"activation_function": "relu", "layer_norm_epsilon": 1e-3},
            "odd-heads": _gpt(54, 3, max_position_embeddings=128),
        },
        # As many positions as the longest sequence has tokens.
        parity={
            "gpt2-learned-positions": {
                "hidden_size": 54,
                "num_attention_heads": 3,
                "max_position_embeddings": 128,
                "tie_word_embeddings": True,
            }
        },
        options=("n_positions", "n_inner", "activation_function", "layer_norm_epsilon"),
        heads="equal",
        rope="none",
        names=_GPT_NAMES,
    ),
    "OPTForCausalLM": ShownFamily(
        shows=(_LEFT,),
        geometries={
            "tied": _opt(max_position_embeddings=128),
            "norms-after-projected": _opt(do_layer_norm_before=False, word_embed_proj_dim=40),
            "no-bias-odd-heads": _opt(60, 5, activation_function="gelu", tie_word_embeddings=False)
            | {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True},
        },
        parity={"opt-projected": _opt(word_embed_proj_dim=40, do_layer_norm_before=False, tie_word_embeddings=True)},
        options=(
            *("max_position_embeddings", "word_embed_proj_dim", "do_layer_norm_before", "enable_bias"),
            *("_remove_final_layer_norm", "layer_norm_elementwise_affine", "activation_function"),
        ),
        fixed={"init_std": 0.15},
        heads="equal",
        rope="none",
        names={"intermediate_size": "ffn_dim"},
    ),
    "GPTJForCausalLM": ShownFamily(
        geometries={
            "partly-rotated": _gpt(64, 4, rotary_dim=8, max_position_embeddings=128),
            "whole-heads": _gpt(64, 8, rotary_dim=8, n_inner=90, max_position_embeddings=256),
            "odd-heads": _gpt(60, 5, rotary_dim=4, max_position_embeddings=256),
        },
        parity={
            "gptj-pairs": {
                "hidden_size": 60,
                "n_inner": 90,
                "num_attention_heads": 5,
                "rotary_dim": 8,
                "tie_word_embeddings": False,
            }
        },
        options=("n_positions", "n_inner", "activation_function", "layer_norm_epsilon"),
        fixed={"tie_word_embeddings": False},
        heads="equal",
        rope="dimensions",
        names=_GPT_NAMES,
    ),
    "BloomForCausalLM": ShownFamily(
        shows=None,
        geometries={
            "tied": _bloom(64, 8),
            "slopes-between-powers": _bloom(72, 6, layer_norm_epsilon=1e-3),
            "untied-odd-heads": _bloom(60, 5, tie_word_embeddings=False),
        },
        # Slopes of four heads, and two between them.
        parity={"bloom-slopes": {"hidden_size": 72, "num_attention_heads": 6, "tie_word_embeddings": True}},
        options=("layer_norm_epsilon",),
        heads="equal",
        rope="none",
        names=_GPT_NAMES | {"hidden_size": "hidden_size"},
        num_defaults=2,
    ),
    "CohereForCausalLM": ShownFamily(
        geometries={
            "normed-heads": grouped(use_qk_norm=True, tied=True),
            "bias-scaled": grouped(attention_bias=True, logit_scale=0.3, layer_norm_eps=1e-3),
            "odd-heads-llama3": odd(use_qk_norm=True, rope_parameters=ROPES["llama3"]),
        },
        parity={"cohere-normed-heads": odd(use_qk_norm=True, logit_scale=0.3, tied=True, rope_parameters=_FAST)},
        options=("attention_bias", "use_qk_norm", "logit_scale", "layer_norm_eps", "hidden_act"),
    ),
}
