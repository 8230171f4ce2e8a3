"""Rotary embeddings as configurations state them: whose original length counts, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from compiler_svc.models.errors import ModelError
from compiler_svc.models.registry import describe_model
from compiler_svc.models.rope_config import LongRope, ProportionalRope, RopeConfig, YarnRope
from tests.checkpoints.tiny_models import ROPES

#: Heads of eight dimensions.
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
}
LLAMA, PHI3, GEMMA3 = "LlamaForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM"
NEOX = "GPTNeoXForCausalLM"


def read(architecture: str, **attributes: Any) -> RopeConfig:
    return describe_model(SIZES | {"architectures": [architecture]} | attributes).rope.rope


def find_violations(architecture: str, **attributes: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        read(architecture, **attributes)
    return [str(one) for one in caught.value.violations]


def test_phi3_has_an_original_length_beside_the_rope_parameters_even_if_the_file_has_not() -> None:
    reference = transformers.Phi3Config(rope_parameters=dict(ROPES["longrope"]), **SIZES)
    assert reference.rope_parameters["original_max_position_embeddings"] == 4096
    rope = read(PHI3, rope_parameters=ROPES["longrope"])
    assert isinstance(rope, LongRope)
    assert rope.original_max_position_embeddings == 4096


def test_each_kind_of_layers_has_an_original_length_of_its_own() -> None:
    """Beside the objects of Gemma 3 it counts for none of them."""
    ropes = {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["default"]}
    rope = read(GEMMA3, rope_parameters=ropes, original_max_position_embeddings=48)
    assert isinstance(rope, YarnRope)
    assert rope.original_max_position_embeddings == 24


def test_proportional_rotates_whole_heads() -> None:
    description = describe_model(
        SIZES | {"architectures": [NEOX], "rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0}}
    )
    assert description.rope.rope == ProportionalRope(100.0, 1.0, 0.25)
    assert description.rope.rotary_dim == 8


KINDS = "default, dynamic, linear, llama3, longrope, proportional, yarn"


@pytest.mark.parametrize(
    ("architecture", "rope", "violation"),
    [
        (LLAMA, {"rope_type": "axial"}, f"rope_type: got 'axial'; accepted: {KINDS}"),
        # An empty value is not the absence of one.
        (LLAMA, {"rope_type": []}, f"rope_type: got '[]'; accepted: {KINDS}"),
        (LLAMA, {"type": ""}, f"rope_type: got ''; accepted: {KINDS}"),
        (PHI3, ROPES["linear"], "rope_type: got 'linear'; accepted: default, longrope"),
        (
            LLAMA,
            {"full_attention": {"rope_theta": 5.0}},
            "full_attention: got {'rope_theta': 5.0}; accepted: nothing: all layers have one rotary embedding",
        ),
        (
            LLAMA,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: got 0.5; accepted: 1.0: the whole head is rotated",
        ),
        (
            LLAMA,
            ROPES["yarn"] | {"rope_theta": 1},
            "rope_theta: got 1.0; accepted: another number, as YaRN divides by its logarithm",
        ),
        (LLAMA, ROPES["yarn"] | {"beta_slow": 1e308}, "beta_slow: got 1e+308; accepted: at most 1e+09"),
    ],
)
def test_what_is_refused(architecture: str, rope: dict[str, Any], violation: str) -> None:
    assert find_violations(architecture, rope_parameters=rope) == [f"rope_parameters.{violation}"]


@pytest.mark.parametrize("architecture", [PHI3, NEOX])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_heads_are_rotated_in_pairs_of_dimensions(architecture: str, share: float) -> None:
    """None, and three, of eight."""
    accepted = "a share that makes an even number of 8 dimensions, 2 at least"
    assert find_violations(architecture, rope_parameters={"partial_rotary_factor": share}) == [
        f"rope_parameters.partial_rotary_factor: got {share}; accepted: {accepted}"
    ]


@pytest.mark.parametrize(
    ("architecture", "place"),
    [(LLAMA, "rope_parameters"), (NEOX, "rope_parameters"), (GEMMA3, "rope_parameters.full_attention")],
)
def test_a_share_above_one_is_named_where_it_is_said(architecture: str, place: str) -> None:
    share: dict[str, Any] = {"partial_rotary_factor": 3.0}
    for name in reversed(place.split(".")):
        share = {name: share}
    assert find_violations(architecture, **share) == [f"{place}.partial_rotary_factor: got 3.0; accepted: at most 1.0"]


def test_where_layers_differ_transformers_truncates_yarn() -> None:
    ropes = {"full_attention": ROPES["yarn"] | {"truncate": False}}
    assert find_violations(GEMMA3, rope_parameters=ropes) == [
        "rope_parameters.full_attention.truncate: got False; accepted: true"
    ]


def test_two_forms_of_the_file_in_one() -> None:
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert find_violations(GEMMA3, rope_parameters=ropes, rope_scaling=scaling) == [
        f"rope_scaling: got {scaling}; accepted: nothing beside rope_parameters.full_attention"
    ]
