"""Where transformers computes nothing to compare with, the error says so, in transformers' words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler_svc.golden.errors import ReferenceFailed
from compiler_svc.golden.reference import Reference
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import draw_tokens, write_tiny_model


@pytest.mark.parametrize(
    ("architecture", "changes", "text", "attributes"),
    [
        (
            "MistralForCausalLM",
            {"sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"]},
            "RuntimeError: The size of tensor a",
            "layer_types",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            "RuntimeError: The size of tensor a",
            "layer_types, sliding_window",
        ),
        ("LlamaForCausalLM", {"initializer_range": "wide"}, "initializer_range", ""),
        ("Gemma2ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "sliding_window", ""),
    ],
)
def test_a_reference_that_fails_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], text: str, attributes: str
) -> None:
    geometry = next(iter(FAMILIES[architecture].geometries.values()))
    tiny = write_tiny_model(tmp_path, geometry | {"num_hidden_layers": 2}, architecture=architecture)
    (tmp_path / "config.json").write_text(json.dumps(dict(tiny.checkpoint.config) | changes))
    with pytest.raises(ReferenceFailed) as caught:
        list(Reference(Checkpoint.open(tmp_path), torch.float32).run(draw_tokens(30), 26))
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "REFERENCE_FAILED")
    assert text in str(caught.value)
    assert "the reference of the golden check, fails on this checkpoint" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert set(filter(None, attributes.split(", "))) <= set(caught.value.metadata["attributes"].split(", "))
