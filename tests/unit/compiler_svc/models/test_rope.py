"""Frequencies equal transformers' to the last bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from compiler_svc.models.layers.rope import RotaryEmbedding, compute_frequencies
from compiler_svc.models.registry import describe_model
from compiler_svc.models.rope_config import RopeConfig
from compiler_svc.models.sources import RopeSource
from compiler_svc.models.specs import RopeSpec
from tests.checkpoints.ropes import ROPES

# As large models have it.
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def pair(rope_parameters: dict[str, Any], head_dim: int) -> tuple[LlamaRotaryEmbedding, RopeConfig]:
    attributes = {"head_dim": head_dim, "hidden_size": 8 * head_dim, "num_attention_heads": 8}
    reference = LlamaConfig(**attributes, max_position_embeddings=32, rope_parameters=dict(rope_parameters))
    config = reference.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return LlamaRotaryEmbedding(reference), describe_model(config).ropes[0].rope


@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("kind", [*ROPES, "llama-3.1"])
def test_frequencies(kind: str, head_dim: int) -> None:
    parameters = {**ROPES, "llama-3.1": LLAMA_3_1}[kind]
    if kind == "longrope":
        factors = torch.linspace(1.0, 4.0, head_dim // 2).tolist()
        parameters = parameters | {"short_factor": factors, "long_factor": [2 * factor for factor in factors]}
    reference, rope = pair(parameters, head_dim)
    frequencies = compute_frequencies(RopeSource(rope, head_dim))
    assert torch.equal(frequencies, reference.inv_freq)
    assert frequencies.dtype == torch.float32
    if kind == "longrope":
        reference(torch.ones(1), torch.arange(100)[None])
        assert torch.equal(compute_frequencies(RopeSource(rope, head_dim, is_long=True)), reference.inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROPES)
def test_rotations_of_rows_of_different_lengths(kind: str, dtype: torch.dtype) -> None:
    _, rope = pair(ROPES[kind], 8)
    spec = RopeSpec("rope", rope, 8)
    module = RotaryEmbedding(spec)
    sources = {one.name.removeprefix("rope."): one.source for one in spec.parameters()}
    module.load_state_dict({name: compute_frequencies(source) for name, source in sources.items()})
    lengths = [5, 24, 25, 32, 33, 90]
    positions = torch.tensor([[length - 1] for length in lengths], dtype=torch.int32)
    cos, sin = module(positions, torch.tensor(lengths, dtype=torch.int32)[:, None], dtype)
    assert cos.dtype == sin.dtype == dtype
    for row, length in enumerate(lengths):
        reference, _ = pair(ROPES[kind], 8)
        expected_cos, expected_sin = reference(torch.ones(1, dtype=dtype), positions[row : row + 1])
        assert torch.equal(cos[row], expected_cos[0]), length
        assert torch.equal(sin[row], expected_sin[0]), length
