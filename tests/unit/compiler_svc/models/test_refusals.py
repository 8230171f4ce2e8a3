"""What families refuse of `config.json`, by the name of the attribute: impossible values, and what is not served."""

from __future__ import annotations

from typing import Any, Final

import pytest

from compiler_svc.models.errors import ModelConfigInvalid, ModelError, ModelNotServed
from compiler_svc.models.registry import describe_model
from tests.checkpoints.ropes import ROPES
from tests.unit.compiler_svc.models.sizes import SIZES

LLAMA, PHI3, SMOLLM3 = "LlamaForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"
GEMMA2, GEMMA3, NEOX = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GPTNeoXForCausalLM"
GPT2, GPTJ, OPT, BLOOM = "GPT2LMHeadModel", "GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM"
#: Of Gemma, whose heads do not divide the hidden size by default.
HEADS: Final = {"head_dim": 8}
#: transformers' default of GPT-J is larger than these heads.
OWN: Final = {GEMMA2: HEADS, GEMMA3: HEADS, GPTJ: {"rotary_dim": 4}}


def rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": options}


def scaled(**options: Any) -> dict[str, Any]:
    return {"rope_scaling": options}


def full(**options: Any) -> dict[str, Any]:
    return rope(full_attention=options)


SLIDES: Final = {"layer_types": ["sliding_attention"] * 8}
KINDS: Final = "default, dynamic, linear, llama3, longrope, proportional, yarn"
PAIRS: Final = "a share that makes an even number of 8 dimensions, 2 at least"
TWO_FORMS: Final = full(rope_type="default", rope_theta=5.0) | scaled(rope_type="linear", factor=8.0)
OF_FULL: Final = "rope_parameters.full_attention"
SMALL: Final = {"hidden_size": 16, "head_dim": 2}
INVERSE: Final = "scale_attn_by_inverse_layer_idx"
POST_NORM: Final = "apply_residual_connection_post_layernorm"

#: Architecture, attributes, and what the one violation begins with.
IMPOSSIBLE: Final[list[tuple[str, dict[str, Any], str]]] = [
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads: "),
    (LLAMA, {"head_dim": 7}, "head_dim: "),
    (LLAMA, {"hidden_size": 66}, "hidden_size: "),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta: "),
    (GPT2, {"hidden_size": 60}, "hidden_size: got 60; accepted: a multiple of 8 heads"),
    (GPT2, {"hidden_size": 40}, "hidden_size: got 40; accepted: a multiple of 16: heads have an even size"),
    (GPT2, {"n_inner": 0}, "n_inner: got 0; accepted: an integer from 1 to 1048576"),
    (GPT2, {"n_positions": 1 << 28}, "n_positions: got 268435456; accepted: an integer from 1 to 134217728"),
    (GPTJ, {"rotary_dim": 5}, "rotary_dim: got 5; accepted: an even number up to 8, the size of heads"),
    (GPTJ, {"rotary_dim": None}, "rotary_dim: got 64; accepted: an even number up to 8, the size of heads"),
    (OPT, {"word_embed_proj_dim": 0}, "word_embed_proj_dim: got 0; accepted: an integer from 1 to 1048576"),
    (NEOX, {"rotary_pct": 2.0}, "rotary_pct: got 2.0; accepted: at most 1.0"),
    # Layers that cannot be.
    (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers: "),
    (SMOLLM3, {"no_rope_layers": [2] * 8}, "no_rope_layers: "),
    (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval: "),
    (SMOLLM3, SLIDES | {"sliding_window": 16}, "use_sliding_window: "),
    (SMOLLM3, SLIDES | {"use_sliding_window": True}, "sliding_window: "),
    (SMOLLM3, {"layer_types": ["chunked_attention"] * 8, "use_sliding_window": True}, "layer_types: "),
    (GEMMA2, {"sliding_window": None}, "sliding_window: "),
    (GEMMA2, {"final_logit_softcapping": 0}, "final_logit_softcapping: "),
    # Rotary embeddings, in both forms of the file.
    (LLAMA, {"rope_parameters": [1]}, "rope_parameters: "),
    (LLAMA, rope(rope_type="yarn", factor=True), "rope_parameters.factor: "),
    (LLAMA, scaled(rope_type="dynamic"), "rope_scaling.factor: "),
    (LLAMA, SMALL | scaled(rope_type="dynamic", factor=2.0), "rope_scaling.rope_type: "),
    (LLAMA, scaled(rope_type="longrope", short_factor=[1], long_factor=[1.0] * 4), "rope_scaling.short_factor: "),
    (
        LLAMA,
        scaled(rope_type="llama3", factor=2, low_freq_factor=4, high_freq_factor=4),
        "rope_scaling.high_freq_factor: ",
    ),
    (LLAMA, rope(**ROPES["yarn"] | {"rope_theta": 1}), "rope_parameters.rope_theta: got 1.0; accepted: another number"),
    (
        LLAMA,
        rope(**ROPES["yarn"] | {"beta_slow": 1e308}),
        "rope_parameters.beta_slow: got 1e+308; accepted: at most 1e+",
    ),
    (GEMMA3, rope(rope_type="default", rope_theta=1e4), "rope_parameters: "),
    (GEMMA3, full(rope_type="linear"), "rope_parameters.full_attention.factor: "),
    (LLAMA, rope(partial_rotary_factor=3.0), "rope_parameters.partial_rotary_factor: got 3.0; "),
    (NEOX, rope(partial_rotary_factor=3.0), "rope_parameters.partial_rotary_factor: got 3.0; "),
]
NOT_SERVED: Final[list[tuple[str, dict[str, Any], str]]] = [
    (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "architectures: "),
    (LLAMA, {"hidden_act": "quick_gelu"}, "hidden_act: got 'quick_gelu'; accepted: "),
    (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method: got 'hqq'; "),
    (LLAMA, scaled(rope_type="mrope"), "rope_scaling.rope_type: got 'mrope'; accepted: "),
    (LLAMA, rope(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor: got 0.5; acc"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights: got False; accepted: true"),
    (GPT2, {INVERSE: True}, f"{INVERSE}: got True; accepted: false"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention: got True; accepted: false"),
    (
        GPTJ,
        {"tie_word_embeddings": True},
        "tie_word_embeddings: got True; accepted: false: the output layer has biases",
    ),
    (BLOOM, {POST_NORM: True}, f"{POST_NORM}: got True; "),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention: "),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: "),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: "),
]
#: Of either kind: what counts is that the text says it.
REFUSED: Final[list[tuple[str, dict[str, Any], str]]] = [
    (LLAMA, rope(rope_type="axial"), f"rope_parameters.rope_type: got 'axial'; accepted: {KINDS}"),
    # An empty value is not the absence of one.
    (LLAMA, rope(rope_type=[]), f"rope_parameters.rope_type: got '[]'; accepted: {KINDS}"),
    (LLAMA, rope(type=""), f"rope_parameters.rope_type: got ''; accepted: {KINDS}"),
    (PHI3, rope(**ROPES["linear"]), "rope_parameters.rope_type: got 'linear'; accepted: default, longrope"),
    (
        LLAMA,
        full(rope_theta=5.0),
        f"{OF_FULL}: got {{'rope_theta': 5.0}}; accepted: nothing: all layers have one rotary",
    ),
    (GEMMA3, full(partial_rotary_factor=3.0), f"{OF_FULL}.partial_rotary_factor: got 3.0; accepted: at most 1.0"),
    # Where layers differ, transformers truncates.
    (GEMMA3, full(**ROPES["yarn"] | {"truncate": False}), f"{OF_FULL}.truncate: got False; accepted: true"),
    (GEMMA3, TWO_FORMS, f"rope_scaling: got {TWO_FORMS['rope_scaling']}; accepted: nothing beside {OF_FULL}"),
    # None, and three, of eight.
    *(
        (
            one,
            rope(partial_rotary_factor=share),
            f"rope_parameters.partial_rotary_factor: got {share}; accepted: {PAIRS}",
        )
        for one in (PHI3, NEOX)
        for share in (0.1, 0.4)
    ),
]


@pytest.mark.parametrize(
    ("error", "architecture", "changes", "violation"),
    [
        (error, *case)
        for error, cases in ((ModelConfigInvalid, IMPOSSIBLE), (ModelNotServed, NOT_SERVED), (ModelError, REFUSED))
        for case in cases
    ],
)
def test_one_violation_is_named(
    error: type[ModelError], architecture: str, changes: dict[str, Any], violation: str
) -> None:
    config = SIZES | {"architectures": [architecture]} | OWN.get(architecture, {}) | changes
    with pytest.raises(error) as caught:
        describe_model(config)
    (found,) = map(str, caught.value.violations)
    assert found.startswith(violation)
