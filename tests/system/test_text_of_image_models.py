"""The text model inside of a model that takes images, from the compile to the client."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints.nested_models import write_nested_model
from tests.checkpoints.tiny_models import TOLERANCE, deviation
from tests.parity.reference import Reference, draw_prompt
from tests.servers.stack import Stack, token_request

CONFIG = {"seq_len": 64, "max_context_length": 40, "torch_dtype": "float32", "output_logits": True}


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=[pytest.mark.toolchain, pytest.mark.slow])])
def test_text_is_what_transformers_computes(stack: Stack, level: int) -> None:
    name = f"gemma3-text-o{level}"
    path = stack.new_model(name)
    reference = Reference(path, write_nested_model(path, "Gemma3ForConditionalGeneration").model)
    document = {"neuron_config": CONFIG, "text_config": {"hidden_size": 64}}
    compiled = stack.compile(name, path, document, level=level)
    (left_out,) = [warning for warning in compiled["warnings"] if warning.startswith("model: left out")]
    assert "vision_tower (" in left_out
    assert "multi_modal_projector (" in left_out
    prompt = draw_prompt(17)
    request = token_request(name, prompt, 24, temperature=0.0)
    request.output.logits = True
    with stack.deployed(name):
        tokens = [token for event in stack.generation().Generate(request) for token in event.delta.tokens]
    assert len(tokens) == 24
    expected = reference.step_logits([*prompt, *(token.id for token in tokens[:-1])], len(prompt))
    assert deviation(torch.tensor([list(token.logits) for token in tokens]), expected) < TOLERANCE
