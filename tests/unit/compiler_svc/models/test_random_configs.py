"""Whatever a `config.json` says, its family describes a model or names what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import FieldViolation
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.errors import ModelError
from compiler_svc.models.registry import describe_model, list_families
from tests.fuzzing import fuzz

REQUIRED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 50,
    "ffn_dim": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # transformers' default of GPT-J is larger than these heads.
    "rotary_dim": 4,
}

_SIZES = st.integers(-1, 12) | st.sampled_from([64, 2**31, 10**400])
_WORDS = st.sampled_from(
    ["silu", "gelu_pytorch_tanh", "tanhshrink", "yarn", "default", "linear", "dynamic", "proportional"]
)
_SCALARS = st.none() | st.booleans() | _SIZES | st.floats() | _WORDS
_LAYERS = st.lists(st.sampled_from([0, 1, "full_attention", "sliding_attention", "chunked_attention", []]), max_size=5)
_ROPES = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings"]), _SCALARS
)
_VALUES = (
    _SCALARS
    | _LAYERS
    | _ROPES
    | st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), _SCALARS | _ROPES)
)


def describe_or_refuse(config: Mapping[str, Any]) -> ModelDescription | tuple[FieldViolation, ...]:
    try:
        return describe_model(config)
    except ModelError as error:
        return error.violations


@pytest.mark.parametrize("architecture", sorted(list_families()))
@fuzz(100)
@given(data=st.data())
def test_configs_are_described_or_refused_by_name(architecture: str, data: st.DataObject) -> None:
    names = sorted(list_families()[architecture].attributes - {"architectures"})
    changes = data.draw(st.dictionaries(st.sampled_from(names), _VALUES, max_size=6))
    described = describe_or_refuse(REQUIRED | {"architectures": [architecture]} | changes)
    if not isinstance(described, ModelDescription):
        assert described
        assert {one.field.partition(".")[0] for one in described} <= set(names)
        return
    for tp_degree in (1, 2, 4):
        assert described.parameters(tp_degree)
    assert len(described.states) == len(described.layers)
