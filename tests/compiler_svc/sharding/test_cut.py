import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.sharding.cut import Cut, Run, cut_evenly, cut_heads
from compiler_svc.sharding.split import copy_rows


def test_equal_parts() -> None:
    assert cut_evenly(1, 8, 2) == Cut(1, 4, ((Run(0, 4),), (Run(4, 4),)))


@pytest.mark.parametrize(
    ("length", "tp_degree", "runs"),
    [
        (7, 2, ((Run(0, 4),), (Run(4, 3), Run(None, 1)))),
        # Four parts of two, of which the last ones have nothing of the axis left.
        (5, 4, ((Run(0, 2),), (Run(2, 2),), (Run(4, 1), Run(None, 1)), (Run(None, 2),))),
    ],
)
def test_zeros_follow_the_end(length: int, tp_degree: int, runs: tuple[tuple[Run, ...], ...]) -> None:
    cut = cut_evenly(0, length, tp_degree)
    assert cut.runs == runs
    assert cut.length == sum(run.length for run in runs[0])


def test_neighbouring_heads_are_one_run() -> None:
    cut = cut_heads(0, ((0, 1, -1, -1), (1, 1, 2, -1)), 10)
    assert cut.length == 40
    assert cut.runs == ((Run(0, 20), Run(None, 20)), (Run(10, 10), Run(10, 20), Run(None, 10)))


@given(
    heads=st.lists(st.integers(-1, 4), min_size=1, max_size=6),
    head_dim=st.integers(1, 3),
    axis=st.integers(0, 1),
    chunk=st.integers(1, 20),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_rows_are_copied_whatever_the_chunks(
    heads: list[int], head_dim: int, axis: int, chunk: int, dtype: torch.dtype
) -> None:
    whole = torch.arange(1, 5 * head_dim * 7 + 1).float().reshape((5 * head_dim, 7) if axis == 0 else (7, 5 * head_dim))
    cut = cut_heads(axis, (tuple(heads),), head_dim)
    blocks = torch.split(whole, head_dim, dim=axis)
    expected = torch.cat([blocks[head] if head >= 0 else torch.zeros_like(blocks[0]) for head in heads], dim=axis)
    # What a staging buffer holds from the tensor before.
    part = torch.full(expected.shape, -5.0, dtype=dtype)
    for first_row in range(0, len(part), chunk):
        copy_rows(whole, cut, 0, first_row, part[first_row : first_row + chunk])
    assert torch.equal(part, expected.to(dtype))


def test_vectors_and_whole_tensors() -> None:
    whole = torch.arange(5.0)
    part = torch.full((3,), 9.0)
    copy_rows(whole, cut_evenly(0, 5, 2), 1, 0, part)
    assert part.tolist() == [3.0, 4.0, 0.0]
    copy_rows(whole, None, 1, 2, part)
    assert part.tolist() == [2.0, 3.0, 4.0]
