import math
from collections.abc import Iterable
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.models.divisions import Run
from compiler_svc.models.sources import Joined, Sliced, Stored, Transposed
from compiler_svc.sharding.parts import copy_block, list_blocks
from compiler_svc.sharding.values import SourceReader

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


class Unquantized(dict[str, torch.Tensor]):
    """Reads tensors as `TensorReader` does."""

    def read(self, name: str) -> torch.Tensor:
        return self[name]

    def unpack(self, name: str) -> None:
        return None

    def trim(self) -> None:
        pass

    def check_finite(self, names: Iterable[str]) -> None:
        pass

    def refuse(self, name: str, value: str, accepted: str) -> NoReturn:
        raise AssertionError(f"{name}: {value}; accepted: {accepted}")


@given(shape=SHAPES, max_items=st.integers(1, 40))
def test_blocks_cover_a_tensor_in_the_order_of_a_file(shape: list[int], max_items: int) -> None:
    items = torch.arange(math.prod(shape)).reshape(shape)
    parts = [items[tuple(slice(*one) for one in block)] for block in list_blocks(shape, max_items)]
    assert all(part.numel() <= max_items for part in parts)
    assert torch.equal(torch.cat([part.flatten() for part in parts]), items.flatten())


def test_a_row_that_is_larger_than_a_block_comes_in_parts() -> None:
    assert list(list_blocks((2, 5), 3)) == [((0, 1), (0, 3)), ((0, 1), (3, 5)), ((1, 2), (0, 3)), ((1, 2), (3, 5))]


@given(
    shape=SHAPES,
    data=st.data(),
    max_items=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_parts_of_any_axis_are_copied_whatever_the_blocks(
    shape: list[int], data: st.DataObject, max_items: int, dtype: torch.dtype
) -> None:
    """Runs of any axis, repeated, in any order and with zeros among them, of tensors cut and joined."""
    whole = torch.arange(1, math.prod(shape) + 1).float().reshape(shape)
    axis, cut = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, shape[0]))
    is_matrix = len(shape) == 2
    stored = {"first": whole[:cut], "all": whole.t() if is_matrix else whole}
    all_of_it = Transposed(Stored("all")) if is_matrix else Stored("all")
    source = Joined((Sliced(Stored("first"), 0, cut), Sliced(all_of_it, cut, shape[0] - cut)))
    values = SourceReader(Unquantized(stored)).open(source, 0)
    entries = data.draw(st.lists(st.integers(-1, shape[axis] - 1), min_size=1, max_size=6))
    runs = [Run(None if entry < 0 else entry, 1) for entry in entries]
    picked = [whole.narrow(axis, max(entry, 0), 1) * (entry >= 0) for entry in entries]
    expected = torch.cat(picked, dim=axis).to(dtype)
    # What a staging buffer holds from the tensor before.
    part = torch.full(expected.shape, -5.0, dtype=dtype)
    for block in list_blocks(part.shape, max_items):
        copy_block(values, axis, runs, block, part[tuple(slice(*one) for one in block)])
    assert torch.equal(part, expected)


@pytest.mark.parametrize("start", [0, 2])
def test_undivided_tensors_are_copied_as_they_are(start: int) -> None:
    part = torch.full((3,), 9.0)
    values = SourceReader(Unquantized({"whole": torch.arange(5.0)})).open(Stored("whole"), 0)
    copy_block(values, None, (), ((start, start + 3),), part)
    assert part.tolist() == [start, start + 1.0, start + 2.0]
