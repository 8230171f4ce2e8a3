"""Noise has its distribution whatever seeds, positions and ids go by, and neighbours of each are independent."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from execution.noise import make_noise, mix
from runtime_svc.engine.scheduler.plan import make_noise_keys
from tests.ranks.noise import draw_keys, measure_fit

#: Bits of ids of the largest vocabularies.
ID_BITS = 18


def count_bits(words: Tensor) -> Tensor:
    """How often each bit is set, as a share, [32]; takes int32 of any shape."""
    return torch.stack([((words >> bit) & 1).float().mean() for bit in range(32)])


def hash_ids(ids: Tensor, keys: Tensor) -> Tensor:
    return mix(ids, keys[:, :1], keys[:, 1:])


#: Seeds and positions of rows, of which neighbours follow each other.
NEIGHBOURS: dict[str, Callable[[int], tuple[int, int]]] = {
    "seeds": lambda row: (row, 0),
    "high halves of seeds": lambda row: (row << 32, 5),
    "positions": lambda row: (7, row),
    "seeds and positions": lambda row: (2**64 - 1 - row, 3000 + row),
}


@pytest.mark.parametrize("step", [1, 128])
@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbours_are_independent(kind: str, step: int) -> None:
    """No two rows, and no two ids, go together more than chance lets the most extreme pair do."""
    keys = torch.tensor([make_noise_keys(*NEIGHBOURS[kind](row)) for row in range(400)], dtype=torch.int32)
    noise = make_noise(torch.arange(0, 1000 * step, step, dtype=torch.int32), keys)
    # Uniform, so that no tail rules the correlation.
    uniform = (torch.exp(-torch.exp(-noise.double())) - 0.5) * math.sqrt(12)
    for one in (uniform, uniform.T):
        count, length = one.shape
        correlation = (one @ one.T / length).fill_diagonal_(0) * math.sqrt(length)
        assert correlation.abs().max() < 6
        assert abs(correlation.pow(2).sum() / (count * (count - 1)) - 1) < 0.05


def test_noise_is_that_of_gumbel() -> None:
    noise = make_noise(torch.arange(500, dtype=torch.int32), draw_keys(400)).flatten()
    places = (torch.exp(-torch.exp(-noise.double())) * 100).long()
    assert measure_fit(torch.bincount(places, minlength=100), torch.ones(100)) > 0.001
    # The tail, where tokens that are hardly likely win.
    assert abs((noise > 9).double().mean() / (1 - math.exp(-math.exp(-9))) - 1) < 0.5


def test_a_bit_of_an_id_changes_half_of_the_bits() -> None:
    keys = draw_keys(4000)
    ids = (keys[:, :1] >> 7) & ((1 << ID_BITS) - 1)
    for bit in range(ID_BITS):
        changed = count_bits(hash_ids(ids, keys) ^ hash_ids(ids ^ (1 << bit), keys))
        assert (changed - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(keys))


def test_ids_of_a_row_have_different_hashes_spread_evenly() -> None:
    ids = torch.arange(1 << 17, dtype=torch.int32)
    for bits in hash_ids(ids, draw_keys(5)):
        assert len(bits.unique()) > len(ids) - 20
        assert measure_fit(torch.bincount((bits >> 24) + 128, minlength=256), torch.ones(256)) > 0.001


@pytest.mark.parametrize("bits", [0, -1, 1, -(2**31), 2**31 - 1])
def test_noise_is_finite_at_both_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("execution.noise.mix", lambda *_: torch.tensor([[bits]], dtype=torch.int32))
    value = (bits % 2**32 + 0.5) / 2**32
    expected = max(-math.log(-math.log1p(-value)), -2.813)
    assert float(make_noise(torch.zeros(1, dtype=torch.int32), draw_keys(1))) == pytest.approx(expected, abs=2e-3)


def test_noise_never_changes() -> None:
    """A client's seed must reproduce its tokens after every release."""
    assert make_noise_keys(2**64 - 1, 2**31) == (-1050252952, 1316893983)
    ids = torch.tensor([0, 1, 50_000, 128_255], dtype=torch.int32)
    assert hash_ids(ids, draw_keys(1, 7, 3)).tolist() == [[1295051082, 549090014, -596612233, 1946087625]]


def test_noise_does_not_depend_on_what_else_is_computed() -> None:
    ids, keys = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).int(), draw_keys(5)
    whole = make_noise(torch.arange(1000, dtype=torch.int32), keys)
    assert torch.equal(make_noise(ids, keys), whole[:, ids])
    assert torch.equal(make_noise(ids.expand(5, -1)[:, :3], keys), whole[:, ids[:3]])
