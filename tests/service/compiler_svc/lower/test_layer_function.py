"""A layer that a library repeats: a function that gets the caches of its layer and writes them in place."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import execution.attention.operators  # noqa: F401 - registers the operators
from execution.forkserver.client import ForkserverClient
from tests.service.compiler_svc.lower.libraries import list_buffer_elements, lower_module, open_library, read_code

pytestmark = pytest.mark.toolchain

LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM = 3, 4, 2, 300, 16
WIDTH = HEADS * HEAD_DIM
CACHE_SHAPE = (SLOTS, HEADS, CAPACITY, HEAD_DIM)


class Layer(nn.Module):
    """Attention, and behind it two products, of which one is not for our kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor, caches: tuple[Tensor, ...]) -> list[Tensor]:
        parts = [part.unflatten(-1, (HEADS, HEAD_DIM)) for part in self.qkv(hidden).split(WIDTH, -1)]
        attended, *written = torch.ops.kiln.attend(
            *parts, *caches, positions, slots, None, None, None, scale=0.25, max_context=CAPACITY
        )
        return [hidden + self.out(attended.flatten(2)) @ self.out.weight, *written]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        state: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            hidden, *written = layer(hidden, positions, slots, caches[2 * index : 2 * index + 2])
            state += written
        return hidden.sin(), *state


def make_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    caches = [torch.randn(CACHE_SHAPE, generator=generator) for _ in range(2 * LAYERS)]
    positions, slots = torch.tensor([[7], [200]], dtype=torch.int32), torch.tensor([[2], [0]], dtype=torch.int32)
    return [torch.randn(2, 1, WIDTH, generator=generator), positions, slots, *caches]


def test_each_call_writes_the_caches_of_its_layer(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model, inputs = Model().requires_grad_(False), make_inputs()
    expected = model(*inputs)
    executable = lower_module(lowerings, tmp_path, model, inputs, num_state=2 * LAYERS)
    with open_library(executable, model.state_dict()) as library:
        got = library.run(inputs)
    for one, other in zip((*got, *inputs[3:]), expected, strict=True):
        torch.testing.assert_close(one, other)
    check_code(read_code(executable))


def check_code(code: str) -> None:
    """Checks that nothing but the kernel touches caches, and that they are in no buffer."""
    (function,) = re.findall(r"static void (kiln_layer_\w+)\(", code)
    head, run = code.split("::run_impl(")
    assert run.count(f"{function}(") == LAYERS
    assert "kiln_attend_" not in run
    assert not re.search(r"arg\w+\.data_ptr\(\)", run), "something else than the layers reads or writes inputs"
    body = head[head.index(f"{function}(") :]
    (call,) = re.findall(r"^ *kiln_attend_float_float\((.*)\);", body, re.MULTILINE)
    caches = re.findall(r"\((\w+_arg\w+)\.data_ptr\(\)\)", call)[:2]
    assert len(caches) == 2, "the kernel writes something else than the inputs"
    for cache in caches:
        assert body.count(f"{cache}.data_ptr()") == 1
    assert 0 < max(list_buffer_elements(body)) < prod(CACHE_SHAPE)
