"""Graphs that call the attention operator, and libraries that hold its kernel."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import execution.attention.operators  # noqa: F401 - registers the operators
from compiler_svc.lower.attend import use_attend_kernel
from execution.forkserver.client import ForkserverClient
from tests.service.compiler_svc.lower.libraries import list_buffer_elements, lower_module, open_library, read_code

SLOTS, KV_HEADS, CAPACITY, HEAD_DIM = 4, 2, 300, 16
CACHE_SHAPE = (SLOTS, KV_HEADS, CAPACITY, HEAD_DIM)


class Layers(nn.Module):
    """Two layers of attention; the second one has options, and a projection for all of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(40, 64, bias=False), nn.Linear(40, 64, bias=False)
        self.qkv, self.out = nn.Linear(64, 128, bias=False), nn.Linear(64, 40, bias=False)

    def forward(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, sinks: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        queries, (keys, values) = self.q(hidden), self.kv(hidden).split(32, -1)
        hidden, *first = self.attend((queries, keys * 2, values), positions, slots, None, caches[:2], window=0)
        parts = self.qkv(hidden).split([64, 32, 32], -1)
        hidden, *second = self.attend(parts, positions, slots, sinks, caches[2:], window=5)
        return self.out(hidden), *first, *second

    def attend(
        self,
        parts: tuple[Tensor, ...],
        positions: Tensor,
        slots: Tensor,
        sinks: Tensor | None,
        caches: tuple[Tensor, ...],
        *,
        window: int,
    ) -> tuple[Tensor, ...]:
        heads = [part.view(*part.shape[:2], -1, HEAD_DIM) for part in parts]
        attended, *written = torch.ops.kiln.attend(
            *heads, *caches, positions, slots, sinks, None, None, scale=0.25, window=window, max_context=CAPACITY
        )
        return attended.flatten(2), *written


def make_inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    positions = torch.tensor([[7], [-1], [200]], dtype=torch.int32) + torch.arange(tokens, dtype=torch.int32)
    positions[1] = -1
    slots = torch.tensor([[2], [3], [0]], dtype=torch.int32)
    caches = [torch.randn(CACHE_SHAPE, generator=generator) for _ in range(4)]
    return [torch.randn(3, tokens, 40, generator=generator), positions, slots, torch.randn(4), *caches]


@pytest.mark.toolchain
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_a_library_writes_its_caches_in_place(tmp_path: Path, lowerings: ForkserverClient, tokens: int) -> None:
    model, inputs = Layers().requires_grad_(False), make_inputs(tokens)
    expected, *caches = model(*inputs)
    executable = lower_module(lowerings, tmp_path, model, inputs, num_state=4)
    with open_library(executable, model.state_dict()) as library:
        (attended,) = library.run(inputs)
    live = [0, 2]
    torch.testing.assert_close(attended[live], expected[live])
    for cache, written in zip(inputs[4:], caches, strict=True):
        torch.testing.assert_close(cache, written)
    assert_nothing_touches_caches_but_the_kernel(read_code(executable))


def assert_nothing_touches_caches_but_the_kernel(code: str) -> None:
    run = code[code.index("::run_impl(") :]
    calls = re.findall(r"^ *kiln_attend_float_float\((.*)\);", run, re.MULTILINE)
    assert len(calls) == 2
    for call in calls:
        caches = re.findall(r"\((arg\w+)\.data_ptr\(\)\)", call)[:2]
        assert len(caches) == 2, "the kernel writes something else than the inputs"
        for cache in caches:
            users = [line.strip() for line in run.splitlines() if f"{cache}.data_ptr()" in line]
            assert [user.partition("(")[0] for user in users] == ["kiln_attend_float_float"]
    assert 0 < max(list_buffer_elements(run)) < prod(CACHE_SHAPE)
    # The values are read where the projection left them, behind queries and keys.
    assert "+ 96" in calls[1]


def count_calls(module: torch.fx.GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


class Once(nn.Module):
    """One call; `overwrites` says whether the new caches take the place of the old ones."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()
        self.overwrites = overwrites

    def forward(self, heads: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attended, new_keys, new_values = torch.ops.kiln.attend(
            heads, heads, heads, keys, values, positions, slots, None, None, None, scale=0.25, max_context=CAPACITY
        )
        if self.overwrites:
            keys.copy_(new_keys)
            values.copy_(new_values)
        return attended + new_keys.sum() * 0


@pytest.mark.parametrize("overwrites", [True, False])
def test_caches_that_a_graph_keeps_are_copied(overwrites: bool) -> None:
    _, positions, slots, _, keys, values, *_ = make_inputs(1)
    inputs = (torch.randn(3, 1, KV_HEADS, HEAD_DIM), positions, slots, keys, values)
    module = torch.export.export(Once(overwrites=overwrites), inputs).module(check_guards=False)
    expected = Once(overwrites=False)(*(tensor.clone() for tensor in inputs))
    before = keys.clone()
    assert use_attend_kernel(module) == {(torch.float32, torch.float32)}
    assert count_calls(module, torch.ops.kiln.attend.default) == 0
    assert count_calls(module, torch.ops.kiln.attend_in_place.default) == 1
    # The keys are read once more in this graph; the values are not.
    assert count_calls(module, torch.ops.aten.clone.default) == (1 if overwrites else 2)
    torch.testing.assert_close(module(*inputs), expected)
    assert keys.equal(before) != overwrites
