"""A layer that a library repeats: a function that gets the caches of its layer and writes them in place."""

from __future__ import annotations

import asyncio
import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import execution.attention.operators  # noqa: F401 - registers the operators
from bundle.manifest import Target
from compiler_svc.lower.job import LoweringOptions
from compiler_svc.lower.pool import LoweringPool
from compiler_svc.lower.program import stage_job
from execution.executors.aoti_library import AotiLibrary
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import LOWERING_CACHE

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
    job = stage_job(
        torch.export.export(model, tuple(inputs)),
        tag="layers",
        num_state=2 * LAYERS,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa="x86-64-v3")),
        directory=tmp_path / "layers",
        cache_dir=LOWERING_CACHE,
    )
    (executable,) = asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    library, weights = AotiLibrary(executable.path), model.state_dict()
    library.bind_constants(weights)
    library.swap_constants()
    got = library.run(inputs)
    for one, other in zip((*got, *inputs[3:]), expected, strict=True):
        torch.testing.assert_close(one, other)
    library.close()
    check_code((job.directory / "executable.wrapper.cpp").read_text())


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
    sizes = dict(re.findall(r"int64_t (int_array_\d+)\[\] = {(.*)};", body))
    buffers = re.findall(r"aoti_torch_empty_strided\(\d+, (\w+),", body)
    elements = [prod(int(size.strip(" L")) for size in sizes[name].split(",") if size.strip()) for name in buffers]
    assert 0 < max(elements) < prod(CACHE_SHAPE)
