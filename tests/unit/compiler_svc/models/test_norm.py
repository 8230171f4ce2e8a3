"""Norms and ALiBi's slopes, against torch's and transformers' own; norms of an axis that ranks divide by heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from compiler_svc.models.divisions import Axis, ByHeads
from compiler_svc.models.layers.alibi import compute_slopes
from compiler_svc.models.layers.norm import make_norm
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.sources import SlopeSource
from compiler_svc.models.specs import LayerNormSpec, RmsNormSpec
from tests.ranks.threads import run_ranks

PLAIN = RmsNormSpec("norm", Axis(48), 1e-5)
LAYER = LayerNormSpec("norm", Axis(48), 1e-5)
ONE_RANK = Ranks(1)
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1).to(dtype)


def load(spec: RmsNormSpec | LayerNormSpec, ranks: Ranks = ONE_RANK, **values: torch.Tensor) -> torch.nn.Module:
    norm = make_norm(spec, ranks)
    norm.load_state_dict(values)
    return norm.to(next(iter(values.values())).dtype) if values else norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        (PLAIN, LlamaRMSNorm),
        (replace(PLAIN, rounds_last=True), Olmo2RMSNorm),
        (replace(PLAIN, rounds_last=True, offset=1.0), Gemma2RMSNorm),
    ],
)
def test_norms_round_where_transformers_does(
    spec: RmsNormSpec, reference: type[torch.nn.Module], dtype: torch.dtype
) -> None:
    theirs = reference(48, eps=1e-5).to(dtype)
    weight, hidden = draw(48, dtype=dtype, seed=1), draw(3, 5, 48, dtype=dtype, seed=2)
    theirs.weight.data = weight
    assert torch.equal(load(spec, weight=weight)(hidden), theirs(hidden))


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (14, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("kind", ["query", "kv"])
@pytest.mark.parametrize("tp_degree", [2, 4])
def test_ranks_normalize_what_they_divide_as_one_does(tp_degree: int, kind: str, heads: tuple[int, int]) -> None:
    """Whatever copies and heads of zeros they hold, and in whatever dtype they sum other results."""
    division = ByHeads(kind, *heads, 4)  # type: ignore[arg-type]
    axis = Axis(4 * heads[kind == "kv"], division)
    spec = RmsNormSpec("norm", axis, 1e-5, rounds_last=True)
    weight, hidden = draw(axis.length, dtype=torch.float32, seed=3), draw(7, axis.length, dtype=torch.float32, seed=4)
    expected = load(spec, weight=weight)(hidden)

    def take_part(whole: torch.Tensor, rank: int) -> torch.Tensor:
        parts = [
            whole.new_zeros(*whole.shape[:-1], run.length)
            if run.start is None
            else whole[..., run.start : run.start + run.length]
            for run in axis.divide(tp_degree)[rank]
        ]
        return torch.cat(parts, dim=-1)

    ranks = Ranks(tp_degree, reduce_dtype=torch.bfloat16)
    found = run_ranks(
        tp_degree, lambda rank: load(spec, ranks, weight=take_part(weight, rank))(take_part(hidden, rank))
    )
    for rank, part in enumerate(found):
        torch.testing.assert_close(part, take_part(expected, rank), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_scale", "has_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norms_compute_what_torch_does(dtype: torch.dtype, has_scale: bool, has_bias: bool) -> None:
    theirs = torch.nn.LayerNorm(48, eps=1e-5, elementwise_affine=has_scale, bias=has_bias).to(dtype)
    values = {name: draw(48, dtype=dtype, seed=len(name)) for name, _ in theirs.named_parameters()}
    assert set(values) == {name for name, is_there in (("weight", has_scale), ("bias", has_bias)) if is_there}
    theirs.load_state_dict(values)
    hidden = draw(3, 5, 48, dtype=dtype, seed=2)
    ours = load(replace(LAYER, has_scale=has_scale, has_bias=has_bias), **values)(hidden)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs(hidden), atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_have_scales_of_their_own(dtype: torch.dtype) -> None:
    weight, hidden = draw(4, 48, dtype=dtype, seed=1), draw(3, 5, 4, 48, dtype=dtype, seed=2)
    theirs = CohereLayerNorm((4, 48), eps=1e-5).to(dtype)
    theirs.weight.data = weight
    assert torch.equal(load(replace(LAYER, heads=Axis(4), has_bias=False), weight=weight)(hidden), theirs(hidden))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 12, 14, 16, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    # At the second position the sum is the slope.
    expected = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1]
    assert torch.equal(compute_slopes(SlopeSource(num_heads)), expected)
