"""Strategies of models: any legal sizes and options of each family, rope kinds included, and mistakes in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hypothesis import strategies as st

from compiler_svc.models.decoder_config import HIDDEN_ACTS

#: Positions of the sequences that are compared; models have at least as many.
NUM_POSITIONS: Final = 40

Strategy = st.SearchStrategy[Any]
Options = Mapping[str, Strategy]

_FLAG: Final = st.booleans()
_SCALE: Final = st.sampled_from([0.1, 0.5, 1.0, 3.0])
_EPSILON: Final = st.sampled_from([1e-6, 1e-5, 1e-3])
_FACTOR: Final = st.sampled_from([1.0, 1.5, 4.0, 7.3])
_THETA: Final = st.sampled_from([100.0, 10_000.0, 1e6])
#: Shorter than the sequences, as long, and longer.
_ORIGINAL: Final = st.integers(8, 60)
#: A cache of transformers has more than the window if that is 1.
_WINDOW: Final = st.integers(2, 50)
_CAP: Final = st.none() | st.sampled_from([1.0, 4.0])
_ACT: Final = st.sampled_from(HIDDEN_ACTS)
_SIZE: Final = st.integers(4, 70)
_LAYER_TYPES: Final = ("sliding_attention", "full_attention")


def _draw_factors(rotary_dim: int) -> Strategy:
    return st.lists(st.sampled_from([1.0, 1.2, 2.0, 5.0]), min_size=rotary_dim // 2, max_size=rotary_dim // 2)


#: By kind, the attributes beside `rope_type` and `rope_theta`, for so many rotated dimensions.
ROPE_KINDS: Final[Mapping[str, Callable[[int], Options]]] = {
    "default": lambda _: {},
    "linear": lambda _: {"factor": _FACTOR},
    "dynamic": lambda _: {"factor": _FACTOR},
    "yarn": lambda _: {
        "factor": _FACTOR,
        "original_max_position_embeddings": _ORIGINAL,
        "beta_fast": st.sampled_from([4.0, 32.0]),
        "mscale": st.sampled_from([0.5, 1.0]),
        "mscale_all_dim": st.sampled_from([0.0, 1.0]),
        "attention_factor": st.none() | st.just(1.3),
    },
    "longrope": lambda rotary_dim: {
        "factor": _FACTOR,
        "original_max_position_embeddings": _ORIGINAL,
        "short_factor": _draw_factors(rotary_dim),
        "long_factor": _draw_factors(rotary_dim),
    },
    "llama3": lambda _: {
        "factor": _FACTOR,
        "original_max_position_embeddings": _ORIGINAL,
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.sampled_from([2.0, 4.0]),
    },
    "proportional": lambda _: {
        "factor": _FACTOR,
        "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]),
    },
}


@st.composite
def draw_rope(draw: st.DrawFn, rotary_dim: int, kinds: tuple[str, ...] = tuple(ROPE_KINDS)) -> dict[str, Any]:
    """`rope_parameters` of any of the kinds."""
    # `dynamic` divides by the rotated dimensions less two.
    kind = draw(st.sampled_from([one for one in kinds if rotary_dim > 2 or one != "dynamic"]))
    options = {"rope_theta": _THETA} | dict(ROPE_KINDS[kind](rotary_dim))
    return {"rope_type": kind} | draw(st.fixed_dictionaries(options))


@st.composite
def _draw_gemma3_ropes(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    # Frequencies of layers with a window do not depend on the length.
    local = tuple(kind for kind in ROPE_KINDS if kind not in ("dynamic", "longrope"))
    return {
        "full_attention": draw(draw_rope(head_dim)),
        "sliding_attention": draw(draw_rope(head_dim, local)),
    }


def _draw_layer_types(num_layers: int) -> Strategy:
    return st.lists(st.sampled_from(_LAYER_TYPES), min_size=num_layers, max_size=num_layers)


#: By family, the options that a model with so many layers may have, beside its sizes and its rotary embedding.
OPTIONS: Final[Mapping[str, Callable[[int], Options]]] = {
    "LlamaForCausalLM": lambda _: {
        "rms_norm_eps": _EPSILON,
        "hidden_act": _ACT,
        "attention_bias": _FLAG,
        "mlp_bias": _FLAG,
    },
    "MistralForCausalLM": lambda _: {"hidden_act": _ACT, "sliding_window": st.none() | _WINDOW},
    "Qwen2ForCausalLM": lambda layers: {
        "use_sliding_window": _FLAG,
        "sliding_window": _WINDOW,
        "max_window_layers": st.integers(0, layers),
    },
    "Qwen3ForCausalLM": lambda layers: {
        "attention_bias": _FLAG,
        "use_sliding_window": st.just(True),
        "sliding_window": _WINDOW,
        "layer_types": _draw_layer_types(layers),
    },
    "Phi3ForCausalLM": lambda _: {"hidden_act": _ACT, "sliding_window": st.none() | _WINDOW},
    "GraniteForCausalLM": lambda _: {
        "attention_bias": _FLAG,
        "mlp_bias": _FLAG,
        "embedding_multiplier": _SCALE,
        "attention_multiplier": _SCALE,
        "residual_multiplier": _SCALE,
        "logits_scaling": _SCALE,
    },
    "Olmo2ForCausalLM": lambda _: {"attention_bias": _FLAG, "rms_norm_eps": _EPSILON, "hidden_act": _ACT},
    "SmolLM3ForCausalLM": lambda layers: {
        "attention_bias": _FLAG,
        "mlp_bias": _FLAG,
        "no_rope_layers": st.none() | st.lists(st.sampled_from([0, 1]), min_size=layers, max_size=layers),
        "no_rope_layer_interval": st.integers(1, 3),
        "use_sliding_window": _FLAG,
        "sliding_window": _WINDOW,
    },
    "Gemma2ForCausalLM": lambda layers: {
        "attention_bias": _FLAG,
        "hidden_activation": _ACT,
        "query_pre_attn_scalar": st.integers(1, 64),
        "sliding_window": _WINDOW,
        "layer_types": st.none() | _draw_layer_types(layers),
        "attn_logit_softcapping": _CAP,
        "final_logit_softcapping": _CAP,
    },
    "Gemma3ForCausalLM": lambda layers: {
        "attention_bias": _FLAG,
        "hidden_activation": _ACT,
        "query_pre_attn_scalar": st.integers(1, 64),
        "sliding_window": _WINDOW,
        "layer_types": st.none() | _draw_layer_types(layers),
        "sliding_window_pattern": st.integers(1, 3),
        "final_logit_softcapping": _CAP,
    },
    "Starcoder2ForCausalLM": lambda _: {
        "use_bias": _FLAG,
        "norm_epsilon": _EPSILON,
        "hidden_act": _ACT,
        "sliding_window": st.none() | _WINDOW,
    },
    "GPTNeoXForCausalLM": lambda _: {
        "attention_bias": _FLAG,
        "use_parallel_residual": _FLAG,
        "hidden_act": _ACT,
        "layer_norm_eps": _EPSILON,
    },
    "GPT2LMHeadModel": lambda _: {
        "n_positions": st.integers(NUM_POSITIONS, 64),
        "n_inner": st.none() | _SIZE,
        "activation_function": _ACT,
        "layer_norm_epsilon": _EPSILON,
    },
    "OPTForCausalLM": lambda _: {
        "max_position_embeddings": st.integers(NUM_POSITIONS, 64),
        "word_embed_proj_dim": st.none() | _SIZE,
        "do_layer_norm_before": _FLAG,
        "_remove_final_layer_norm": _FLAG,
        "enable_bias": _FLAG,
        "layer_norm_elementwise_affine": _FLAG,
        "activation_function": _ACT,
        "init_std": st.just(0.15),
    },
    "GPTJForCausalLM": lambda _: {
        "n_inner": st.none() | _SIZE,
        "activation_function": _ACT,
        "layer_norm_epsilon": _EPSILON,
        # transformers makes a table of so many rotations.
        "n_positions": st.integers(NUM_POSITIONS, 64),
    },
    "BloomForCausalLM": lambda _: {"layer_norm_epsilon": _EPSILON},
    "CohereForCausalLM": lambda _: {
        "attention_bias": _FLAG,
        "use_qk_norm": _FLAG,
        "logit_scale": _SCALE,
        "layer_norm_eps": _EPSILON,
        "hidden_act": _ACT,
    },
}

#: Families whose heads have keys of their own.
_EQUAL_HEADS: Final = ("GPT2LMHeadModel", "GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM")
#: Families whose heads have a size of their own, whatever the hidden size is; of the others, some may have.
_FIXED_HEADS: Final = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
#: Families whose heads divide the hidden size. transformers measures Phi-3's factors by it.
_DERIVED_HEADS: Final = (*_EQUAL_HEADS, "Phi3ForCausalLM")
#: What families call their sizes, where it is not what most do; None: it follows from other sizes or is an option.
_NAMES: Final[Mapping[str, Mapping[str, str | None]]] = {
    **dict.fromkeys(
        ("GPT2LMHeadModel", "GPTJForCausalLM"),
        {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
        | {"intermediate_size": None},
    ),
    "BloomForCausalLM": {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "intermediate_size": None},
    "OPTForCausalLM": {"intermediate_size": "ffn_dim"},
}
#: How families rotate heads, where they do not rotate whole ones by any kind.
_ROPES: Final[Mapping[str, Callable[[int], Options]]] = {
    **dict.fromkeys(("GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM"), lambda _: {}),
    "GPTJForCausalLM": lambda head_dim: {"rotary_dim": st.integers(1, head_dim // 2).map(lambda half: 2 * half)},
    "GPTNeoXForCausalLM": lambda head_dim: {"rope_parameters": _draw_partial_rope(head_dim, tuple(ROPE_KINDS))},
    # transformers takes no other kinds for it.
    "Phi3ForCausalLM": lambda head_dim: {"rope_parameters": _draw_partial_rope(head_dim, ("default", "longrope"))},
    "Gemma3ForCausalLM": lambda head_dim: {"rope_parameters": _draw_gemma3_ropes(head_dim)},
}


@st.composite
def _draw_partial_rope(draw: st.DrawFn, head_dim: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    rotated = 2 * draw(st.integers(1, head_dim // 2))
    rope = draw(draw_rope(rotated, kinds))
    return {"partial_rotary_factor": rotated / head_dim} | rope


@st.composite
def draw_geometry(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Attributes of a legal model of a family, as transformers' configuration takes them."""
    num_heads, num_layers = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    has_head_dim = architecture in _FIXED_HEADS or (architecture not in _DERIVED_HEADS and draw(_FLAG))
    # Three ranks divide a hidden size of three at least.
    head_dim = 2 * draw(st.integers(1 if has_head_dim else 2, 8))
    sizes = {
        "vocab_size": draw(st.integers(8, 90)),
        "hidden_size": num_heads * (draw(st.integers(4, 20)) if has_head_dim else head_dim),
        "intermediate_size": draw(_SIZE),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    if has_head_dim:
        sizes["head_dim"] = head_dim
    if architecture not in _EQUAL_HEADS:
        divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        sizes["num_key_value_heads"] = draw(st.sampled_from(divisors))
        sizes["max_position_embeddings"] = draw(st.sampled_from([NUM_POSITIONS // 2, 256]))
    names = _NAMES.get(architecture, {})
    attributes = {name: size for said, size in sizes.items() if (name := names.get(said, said)) is not None}
    options = dict(OPTIONS[architecture](num_layers))
    options |= _ROPES.get(architecture, lambda rotary_dim: {"rope_parameters": draw_rope(rotary_dim)})(head_dim)
    options["tie_word_embeddings"] = st.just(False) if architecture == "GPTJForCausalLM" else _FLAG
    return attributes | draw(st.fixed_dictionaries(options))


#: Values that no attribute accepts whose value is of the type.
_IMPOSSIBLE: Final[Mapping[type, tuple[Any, ...]]] = {
    bool: ("true", 1, []),
    int: (-1, "8", True, 10**400, {}),
    float: (-1.0, math.nan, math.inf, "1.0", True, 10**400, []),
    str: ("tanhshrink", 3, [], {}),
    list: (["tanhshrink"], 3, "tanhshrink", {}),
    dict: (3, "tanhshrink", [1]),
}


def list_mistakes(attributes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to replace one value of a model, in objects too, by an impossible one: where, and the attributes."""
    for name, value in attributes.items():
        for impossible in () if value is None else _IMPOSSIBLE[type(value)]:
            yield name, attributes | {name: impossible}
        for path, inner in list_mistakes(value) if isinstance(value, dict) else ():
            yield f"{name}.{path}", attributes | {name: inner}
