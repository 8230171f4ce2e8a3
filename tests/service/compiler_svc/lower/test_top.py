"""The kernel that finds candidates, by itself, and the graphs that call it."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from compiler_svc.lower.top import compile_top_kernel, use_top_kernel
from execution.candidates import take_top
from tests.kernel_library import load_kernel
from tests.lowering_cache import HOST


@cache
def load_functions() -> ctypes.CDLL:
    return load_kernel(HOST.isa, lambda job: [compile_top_kernel(job)])


def find_top(keys: Tensor, count: int, *live: int) -> Tensor:
    functions = load_functions()
    places = torch.full((len(keys), count), -1, dtype=torch.int64)
    functions.set_threads(2)
    functions.kiln_take_top(
        ctypes.c_void_p(places.data_ptr()),
        ctypes.c_void_p(keys.data_ptr()),
        *(ctypes.c_int64(size) for size in (*keys.shape, count)),
        (ctypes.c_int32 * len(live))(*live),
        ctypes.c_int64(len(live)),
    )
    return places


@pytest.mark.toolchain
@pytest.mark.parametrize(("width", "count"), [(1, 1), (7, 1), (7, 7), (300, 64), (5000, 256), (5000, 5000)])
def test_places_are_those_of_topk(width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(width + count)
    shuffled = torch.stack([torch.randperm(width, generator=generator) for _ in range(3)]) * 2**33 - 2**40
    for keys in (shuffled, shuffled.sort(descending=True).values, shuffled.sort().values):
        assert find_top(keys.contiguous(), count, 3).equal(keys.topk(count).indices)


@pytest.mark.toolchain
def test_other_rows_get_places_that_exist() -> None:
    keys = torch.arange(40).view(4, 10)
    assert find_top(keys, 3, 1).tolist() == [[9, 8, 7], *[[0, 1, 2]] * 3]


@pytest.mark.toolchain
def test_groups_of_rows_have_their_own_live_ones() -> None:
    keys = torch.arange(60).view(6, 10)
    live, idle = [9, 8, 7], [0, 1, 2]
    assert find_top(keys, 3, 2, 0, 1).tolist() == [live, live, idle, idle, live, idle]
    counts = torch.tensor([2, 0, 1], dtype=torch.int32)
    assert torch.ops.kiln.take_top(keys, 3, counts).tolist() == find_top(keys, 3, 2, 0, 1).tolist()


class Candidates(nn.Module):
    def forward(self, logits: Tensor, live_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (*take_top(logits, 5), live_rows + 1)


def test_graphs_of_sampling_call_the_kernel() -> None:
    logits, live = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)), torch.tensor([3], dtype=torch.int32)
    module = torch.export.export(Candidates(), (logits, live)).module()
    assert isinstance(module, GraphModule)
    (_, rows) = module.graph.find_nodes(op="placeholder")
    assert use_top_kernel(module, {7: rows}) == 0, "nothing says which of 4 rows are live"
    expected = module(logits, live)
    assert use_top_kernel(module, {4: rows}) == 1
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    values, ids, _ = module(logits, live)
    assert values[:3].equal(expected[0][:3])
    assert ids[:3].equal(expected[1][:3])
    assert ids[3].tolist() == [0, 1, 2, 3, 4]
