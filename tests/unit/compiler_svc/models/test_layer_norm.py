"""Layer normalization and ALiBi's slopes, against torch's and transformers' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from compiler_svc.models.description import NormSpec
from compiler_svc.models.divisions import Axis
from compiler_svc.models.layers.alibi import compute_slopes
from compiler_svc.models.layers.norm import LayerNorm, make_norm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.sources import SlopeSource

PLAIN = NormSpec("norm", Axis(48), 1e-5, is_centered=True)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1).to(dtype)


def make(spec: NormSpec, **values: torch.Tensor) -> LayerNorm:
    norm = make_norm(spec, Ranks(1))
    assert isinstance(norm, LayerNorm)
    norm.load_state_dict(values)
    return norm.to(next(iter(values.values())).dtype) if values else norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, False)])
def test_norms_compute_what_torch_does(dtype: torch.dtype, has_scale: bool, has_bias: bool) -> None:
    theirs = torch.nn.LayerNorm(48, eps=1e-5, elementwise_affine=has_scale, bias=has_bias).to(dtype)
    values = {name: draw(48, dtype=dtype, seed=len(name)) for name, _ in theirs.named_parameters()}
    assert set(values) == {name for name, is_there in (("weight", has_scale), ("bias", has_bias)) if is_there}
    theirs.load_state_dict(values)
    hidden = draw(3, 5, 48, dtype=dtype, seed=2)
    ours = make(replace(PLAIN, has_scale=has_scale, has_bias=has_bias), **values)(hidden)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs(hidden), atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_may_have_scales_of_their_own(dtype: torch.dtype) -> None:
    weight, hidden = draw(4, 48, dtype=dtype, seed=1), draw(3, 5, 4, 48, dtype=dtype, seed=2)
    theirs = CohereLayerNorm((4, 48), eps=1e-5).to(dtype)
    theirs.weight.data = weight
    assert torch.equal(make(replace(PLAIN, heads=Axis(4)), weight=weight)(hidden), theirs(hidden))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 12, 14, 16, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    # At the second position the sum is the slope.
    expected = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1]
    assert torch.equal(compute_slopes(SlopeSource(num_heads)), expected)
