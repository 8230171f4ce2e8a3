"""What a configuration says of the model's norms and gates, against a family that has them and one that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.errors import FeatureNotServed
from compiler_svc.planning.admission import check_claims
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import write_tiny_model

#: Architecture, attribute with its value, and what is served if the model contradicts it.
CASES = [
    ("Qwen3ForCausalLM", {"qk_layernorm": True}, None),
    ("Olmo2ForCausalLM", {"qk_layernorm": True}, None),
    ("LlamaForCausalLM", {"qk_layernorm": True}, "False: LlamaForCausalLM does not normalize queries and keys"),
    ("GPT2LMHeadModel", {"qk_layernorm": True}, "False: GPT2LMHeadModel does not normalize queries and keys"),
    ("GPT2LMHeadModel", {"glu_mlp": False}, None),
    ("OPTForCausalLM", {"glu_mlp": False}, None),
    ("MistralForCausalLM", {"glu_mlp": False}, "True: the MLP of MistralForCausalLM has gates"),
    ("MistralForCausalLM", {"glu_mlp": True}, None),
]


@pytest.mark.parametrize(
    ("architecture", "attributes", "refused"), CASES, ids=lambda one: one if isinstance(one, str) else None
)
def test_the_model_decides(architecture: str, attributes: dict[str, Any], refused: str | None, tmp_path: Path) -> None:
    geometry = next(iter(FAMILIES[architecture].geometries.values()))
    checkpoint = write_tiny_model(tmp_path, geometry, architecture=architecture).checkpoint
    resolution = resolve_config({"neuron_config": attributes}, checkpoint_dtype="float32")
    (name,) = attributes
    is_default = attributes == {"glu_mlp": True}
    assert [hint.field for hint in resolution.hints] == ([] if is_default else [f"neuron_config.{name}"])
    if refused is None:
        check_claims(checkpoint, resolution.config.neuron_config)
        return
    with pytest.raises(FeatureNotServed) as caught:
        check_claims(checkpoint, resolution.config.neuron_config)
    (violation,) = caught.value.violations
    assert violation.field == f"neuron_config.{name}"
    assert violation.accepted.startswith(refused)
