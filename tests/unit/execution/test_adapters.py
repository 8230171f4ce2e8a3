"""`kiln::adapt`: its reference, and what XLA gets of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compiler_svc.lower import xla
from execution.adapters import add_adapters
from tests.contract.families.test_devices import Watch

SLOTS, RANK, INPUTS, OUTPUTS = 4, 3, 20, 7
#: Two rows share slot 2, one has none, and no row names slot 1.
IDS: Final = torch.tensor([2, -1, 0, 2, 3], dtype=torch.int32)
Adapt = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_matrices(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return draw(SLOTS, RANK, INPUTS, seed=1, dtype=dtype), draw(SLOTS, OUTPUTS, RANK, seed=2, dtype=dtype)


@pytest.fixture(params=[add_adapters, xla.add_adapters], ids=["reference", "xla"])
def adapt(request: pytest.FixtureRequest) -> Adapt:
    chosen: Adapt = request.param
    return chosen


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_has_its_own_adapter(adapt: Adapt, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The product is rounded once between A and B, and once behind them."""
    rows, (a, b) = draw(*shape, INPUTS, dtype=dtype), draw_matrices(dtype)
    added = adapt(rows, a, b, IDS)
    assert (added.shape, added.dtype) == ((*shape, OUTPUTS), dtype)
    for number, slot in enumerate(IDS.tolist()):
        if slot == -1:
            assert not added[number].any()
        else:
            reduced = (rows[number].double() @ a[slot].double().t()).to(dtype)
            expected = (reduced.double() @ b[slot].double().t()).to(dtype)
            # Sums in another order may round to the neighbour.
            assert_close(added[number], expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_slots_that_no_row_names_have_no_effect(adapt: Adapt) -> None:
    """Not even infinities, in a row without an adapter or beside it."""
    rows, (a, b) = draw(5, 2, INPUTS), draw_matrices()
    expected = adapt(rows, a, b, IDS)
    a[1], b[1] = torch.inf, torch.nan
    assert torch.equal(adapt(rows, a, b, IDS), expected)
    a[0] = torch.nan
    ids = IDS.where(IDS != 0, -1)
    assert torch.equal(adapt(rows, a, b, ids), expected * (ids == IDS)[:, None, None])


def test_a_row_depends_on_no_other_row() -> None:
    rows, (a, b) = draw(64, 9, INPUTS), draw_matrices()
    ids = torch.full((64,), 2, dtype=torch.int32)
    together = add_adapters(rows, a, b, ids)
    for number in (0, 1, 17, 63):
        assert torch.equal(add_adapters(rows[number][None], a, b, ids[:1])[0], together[number])


def test_no_row_has_an_adapter() -> None:
    a, b = draw_matrices()
    ids = torch.full((5,), -1, dtype=torch.int32)
    assert torch.equal(add_adapters(draw(5, 2, INPUTS), a, b, ids), torch.zeros(5, 2, OUTPUTS))


def test_xla_gets_static_shapes_and_narrow_integers() -> None:
    arguments = [one.to("meta") for one in (draw(5, 2, INPUTS), *draw_matrices(), IDS)]
    with Watch() as watch:
        added = xla.add_adapters(*arguments)
    assert added.shape == (5, 2, OUTPUTS)
    assert watch.wide == watch.on_cpu == set()


def test_the_operator_is_what_torch_expects_of_one() -> None:
    arguments = (draw(5, 2, INPUTS), *draw_matrices(), IDS)
    torch.library.opcheck(torch.ops.kiln.adapt.default, arguments)
    assert torch.equal(torch.ops.kiln.adapt(*arguments), add_adapters(*arguments))


@pytest.mark.parametrize("place", range(4))
def test_shapes_that_do_not_fit(place: int) -> None:
    arguments = [one.to("meta") for one in (draw(5, 2, INPUTS), *draw_matrices(), IDS)]
    arguments[place] = arguments[place][1:] if place == 3 else arguments[place][..., 1:]
    with pytest.raises(AssertionError):
        torch.ops.kiln.adapt(*arguments)
