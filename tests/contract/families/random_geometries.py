"""Strategies of models: any legal sizes and options of each family, rope kinds included, and mistakes in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from hypothesis import strategies as st

from compiler_svc.models.decoder_config import HIDDEN_ACTS
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.shown_family import ShownFamily

#: Positions of the sequences that are compared; models have at least as many.
NUM_POSITIONS: Final = 40

Strategy = st.SearchStrategy[Any]
Options = Mapping[str, Strategy]

_FLAG: Final = st.booleans()
_SCALE: Final = st.sampled_from([0.1, 0.5, 1.0, 3.0])
_EPSILON: Final = st.sampled_from([1e-6, 1e-5, 1e-3])
_CAP: Final = st.none() | st.sampled_from([1.0, 4.0])
_ACT: Final = st.sampled_from(HIDDEN_ACTS)
_SIZE: Final = st.integers(4, 70)
_POSITIONS: Final = st.integers(NUM_POSITIONS, 64)
_FACTOR: Final = st.sampled_from([1.0, 1.5, 4.0, 7.3])
_THETA: Final = st.sampled_from([100.0, 10_000.0, 1e6])
#: Shorter than the sequences, as long, and longer.
_ORIGINAL: Final = st.integers(8, 60)


def _for_each_layer(*values: Any) -> Callable[[int], Strategy]:
    return lambda num_layers: st.lists(st.sampled_from(values), min_size=num_layers, max_size=num_layers)


#: The options of all families. A function takes the number of layers.
OPTIONS: Final[Mapping[str, Strategy | Callable[[int], Strategy]]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "enable_bias", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("use_parallel_residual", "use_qk_norm", "do_layer_norm_before"), _FLAG),
    **dict.fromkeys(("_remove_final_layer_norm", "layer_norm_elementwise_affine"), _FLAG),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _ACT),
    **dict.fromkeys(("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), _SCALE),
    **dict.fromkeys(("logits_scaling", "logit_scale"), _SCALE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
    **dict.fromkeys(("n_inner", "word_embed_proj_dim"), st.none() | _SIZE),
    # transformers makes a table of so many rotations.
    **dict.fromkeys(("n_positions", "max_position_embeddings"), _POSITIONS),
    **dict.fromkeys(("no_rope_layer_interval", "sliding_window_pattern"), st.integers(1, 3)),
    "query_pre_attn_scalar": st.integers(1, 64),
    # A cache of transformers has more than the window if that is 1.
    "sliding_window": st.integers(2, 50),
    "max_window_layers": lambda num_layers: st.integers(0, num_layers),
    "layer_types": _for_each_layer("sliding_attention", "full_attention"),
    "no_rope_layers": _for_each_layer(0, 1),
}


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
    "proportional": lambda _: {"factor": _FACTOR, "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0])},
}


def _draw_rope(draw: st.DrawFn, rotary_dim: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """`rope_parameters` of any of the kinds."""
    # `dynamic` divides by the rotated dimensions less two.
    kind = draw(st.sampled_from([one for one in kinds if rotary_dim > 2 or one != "dynamic"]))
    options = {"rope_theta": _THETA} | dict(ROPE_KINDS[kind](rotary_dim))
    return {"rope_type": kind} | draw(st.fixed_dictionaries(options))


def _draw_rotation(draw: st.DrawFn, family: ShownFamily, head_dim: int) -> dict[str, Any]:
    """How a model rotates heads of a size."""
    kinds = family.rope_kinds or tuple(ROPE_KINDS)
    if family.rope == "none":
        return {}
    if family.rope == "heads":
        return {"rope_parameters": _draw_rope(draw, head_dim, kinds)}
    if family.rope == "by_layer":
        # Frequencies of layers with a window do not depend on the length.
        local = tuple(kind for kind in kinds if kind not in ("dynamic", "longrope"))
        ropes = {"full_attention": kinds, "sliding_attention": local}
        return {"rope_parameters": {name: _draw_rope(draw, head_dim, own) for name, own in ropes.items()}}
    rotated = 2 * draw(st.integers(1, head_dim // 2))
    if family.rope == "dimensions":
        return {"rotary_dim": rotated}
    return {"rope_parameters": {"partial_rotary_factor": rotated / head_dim} | _draw_rope(draw, rotated, kinds)}


@st.composite
def draw_geometry(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Attributes of a legal model of a family, as transformers' configuration takes them."""
    family = FAMILIES[architecture]
    num_heads, num_layers = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    has_head_dim = family.heads == "fixed" or (family.heads == "free" and draw(_FLAG))
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
    if family.heads != "equal":
        divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        sizes["num_key_value_heads"] = draw(st.sampled_from(divisors))
        sizes["max_position_embeddings"] = draw(st.sampled_from([NUM_POSITIONS // 2, 256]))
    names = {said: family.names.get(said, said) for said in sizes}
    attributes = {name: sizes[said] for said, name in names.items() if name is not None}
    options = {"tie_word_embeddings": _FLAG}
    for name in (*family.options, *family.may_lack):
        drawn = OPTIONS[name]
        one = drawn(num_layers) if callable(drawn) else drawn
        options[name] = st.none() | one if name in family.may_lack else one
    attributes |= _draw_rotation(draw, family, head_dim)
    return attributes | draw(st.fixed_dictionaries(options)) | family.fixed


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
