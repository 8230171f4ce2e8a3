"""Rotary embeddings as configurations state them: whose theta and original length count, and what is derived."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from compiler_svc.models.registry import describe_model
from compiler_svc.models.rope_config import DefaultRope, ProportionalRope, RopeConfig
from tests.checkpoints.ropes import ROPES
from tests.unit.compiler_svc.models.sizes import SIZES

#: Heads of eight dimensions in every family.
MODEL = SIZES | {"head_dim": 8}
LLAMA, PHI3 = "LlamaForCausalLM", "Phi3ForCausalLM"
GEMMA3, NEOX = "Gemma3ForCausalLM", "GPTNeoXForCausalLM"


def read(architecture: str, **attributes: Any) -> RopeConfig:
    return describe_model(MODEL | {"architectures": [architecture]} | attributes).ropes[0].rope


def test_phi3_has_an_original_length_beside_the_rope_parameters_even_if_the_file_has_not() -> None:
    reference = transformers.Phi3Config(rope_parameters=dict(ROPES["longrope"]), **MODEL)
    assert reference.rope_parameters["original_max_position_embeddings"] == 4096
    rope: Any = read(PHI3, rope_parameters=ROPES["longrope"])
    assert rope.original_max_position_embeddings == 4096


def test_each_kind_of_layers_has_an_original_length_of_its_own() -> None:
    """Beside the objects of Gemma 3 it counts for none of them."""
    ropes = {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["default"]}
    rope: Any = read(GEMMA3, sliding_window_pattern=2, rope_parameters=ropes, original_max_position_embeddings=48)
    assert rope.original_max_position_embeddings == 24


def test_proportional_rotates_whole_heads() -> None:
    description = describe_model(
        MODEL | {"architectures": [NEOX], "rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0}}
    )
    assert description.ropes[0].rope == ProportionalRope(100.0, 1.0, 0.25)
    assert description.ropes[0].rotary_dim == 8


@pytest.mark.parametrize(
    ("attributes", "rope"),
    [
        ({"rope_theta": 5.0, "rope_scaling": None}, DefaultRope(5.0)),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, DefaultRope(6.0)),
        ({"rope_theta": 5, "rope_parameters": {"rope_type": "default"}}, DefaultRope(5.0)),
        ({"rope_scaling": {"type": "default"}}, DefaultRope(10_000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(7.0)),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(7.0)),
    ],
)
def test_theta_from_any_place(attributes: dict[str, Any], rope: RopeConfig) -> None:
    assert read(LLAMA, **attributes) == rope


def test_yarn_derives_what_is_missing() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "mscale": 0}
    rope: Any = read(LLAMA, max_position_embeddings=4096, rope_parameters=yarn)
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (4.0, 32.0, 1.0, True)
    assert rope.attention_scaling == pytest.approx(1.1386294)


def test_original_length_beside_the_rope_parameters_wins() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 64}
    rope: Any = read(LLAMA, **lengths, rope_scaling=longrope)
    assert rope.original_max_position_embeddings == 64
