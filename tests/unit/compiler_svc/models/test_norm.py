"""Options of the norm: its scales' offset, where it rounds, and an axis that ranks divide by heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from compiler_svc.models.description import NormSpec
from compiler_svc.models.divisions import Axis, ByHeads
from compiler_svc.models.layers.norm import RmsNorm
from compiler_svc.models.layers.ranks import Ranks
from tests.ranks.threads import run_ranks

PLAIN = NormSpec("norm", Axis(48), 1e-5)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1).to(dtype)


def load(spec: NormSpec, weight: torch.Tensor, ranks: Ranks) -> RmsNorm:
    norm = RmsNorm(spec, ranks)
    norm.weight.data = weight
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        (PLAIN, LlamaRMSNorm),
        (replace(PLAIN, rounds_last=True), Olmo2RMSNorm),
        (replace(PLAIN, rounds_last=True, offset=1.0), Gemma2RMSNorm),
    ],
)
def test_norms_round_where_transformers_does(
    spec: NormSpec, reference: type[torch.nn.Module], dtype: torch.dtype
) -> None:
    theirs = reference(48, eps=1e-5).to(dtype)
    weight, hidden = draw(48, dtype=dtype, seed=1), draw(3, 5, 48, dtype=dtype, seed=2)
    theirs.weight.data = weight
    assert torch.equal(load(spec, weight, Ranks(1))(hidden), theirs(hidden))


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (14, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("kind", ["query", "kv"])
@pytest.mark.parametrize("tp_degree", [2, 4])
def test_ranks_normalize_what_they_divide_as_one_does(tp_degree: int, kind: str, heads: tuple[int, int]) -> None:
    """Whatever copies and heads of zeros they hold, and in whatever dtype they sum other results."""
    division = ByHeads(kind, *heads, 4)  # type: ignore[arg-type]
    axis = Axis(4 * heads[kind == "kv"], division)
    spec = NormSpec("norm", axis, 1e-5, rounds_last=True)
    weight, hidden = draw(axis.length, dtype=torch.float32, seed=3), draw(7, axis.length, dtype=torch.float32, seed=4)
    expected = load(spec, weight, Ranks(1))(hidden)

    def take_part(whole: torch.Tensor, rank: int) -> torch.Tensor:
        parts = [
            whole.new_zeros(*whole.shape[:-1], run.length)
            if run.start is None
            else whole[..., run.start : run.start + run.length]
            for run in axis.divide(tp_degree)[rank]
        ]
        return torch.cat(parts, dim=-1)

    ranks = Ranks(tp_degree, reduce_dtype=torch.bfloat16)
    found = run_ranks(tp_degree, lambda rank: load(spec, take_part(weight, rank), ranks)(take_part(hidden, rank)))
    for rank, part in enumerate(found):
        torch.testing.assert_close(part, take_part(expected, rank), atol=1e-6, rtol=1e-6)
