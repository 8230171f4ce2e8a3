"""Graphs that call the kernel of linear layers, and libraries that hold it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from bundle.abi.formats import FORMATS, WeightFormat
from bundle.abi.tensor import DType
from compiler_svc.config import NeuronConfig
from compiler_svc.lower.linear import name_function, use_linear_kernel, write_kernel_source
from execution.dtypes import TORCH_DTYPES
from execution.forkserver.client import ForkserverClient
from tests.service.compiler_svc.lower.libraries import lower_module, open_library
from tests.service.compiler_svc.lower.test_linear import draw, random
from tests.tools import require_tool


class Layers(nn.Module):
    """Three layers of one input, one with a bias, and one layer of bfloat16; the state is what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(40, 24, bias=False), nn.Linear(40, 9), nn.Linear(40, 16, bias=False)
        self.narrow = nn.Linear(49, 10, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.q(x).sigmoid(), self.k(x), self.v(x)], -1)
        return self.narrow(joined.to(torch.bfloat16)) + last, last + 1


def calls_of(module: GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_layers_of_one_input_become_one_call() -> None:
    model, x, last = Layers(), random(3, 1, 40), torch.zeros(3, 1, 10, dtype=torch.bfloat16)
    module = torch.export.export(model, (x, last)).module()
    expected = module(x, last)[0]
    assert use_linear_kernel(module) == {(torch.float32,) * 2, (torch.bfloat16,) * 2}
    assert calls_of(module, torch.ops.kiln.linear.default) == 2
    assert calls_of(module, torch.ops.aten.linear.default) == 0
    torch.testing.assert_close(module(x, last)[0], expected)


def test_layers_that_take_what_a_layer_gives() -> None:
    """As OPT's head takes what its output projection gives."""
    model, x = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 9, bias=False), nn.Linear(9, 10)), random(3, 40)
    module = torch.export.export(model, (x,)).module()
    expected = module(x)
    assert use_linear_kernel(module) == {(torch.float32, torch.float32)}
    assert calls_of(module, torch.ops.kiln.linear.default) == 3
    assert calls_of(module, torch.ops.aten.linear.default) == 0
    torch.testing.assert_close(module(x), expected)


def test_calls_are_told_which_rows_are_live() -> None:
    class Prompts(nn.Module):
        """Of each sequence, all tokens through one layer and the last one through another."""

        def __init__(self) -> None:
            super().__init__()
            self.all, self.last = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, live: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.all(x), self.last(x[:, -1]), live + num_tokens

    one, two = torch.ones(1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    module = torch.export.export(Prompts(), (torch.ones(2, 5, 8), one, two)).module()
    _, live, num_tokens = module.graph.find_nodes(op="placeholder")
    use_linear_kernel(module, {2: live, 10: num_tokens})
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.kiln.linear.default)
    assert [call.args[3] for call in calls] == [num_tokens, live]


def test_layers_of_computed_weights_stay() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.float())

    module = torch.export.export(Computed(), (torch.ones(2, 8),)).module()
    assert use_linear_kernel(module) == set()
    assert calls_of(module, torch.ops.aten.linear.default) == 1


class Quantized(nn.Module):
    """A layer of a format, or of the activations' dtype where there is none."""

    def __init__(self, row: WeightFormat | None, dtype: torch.dtype) -> None:
        super().__init__()
        group = 0 if row is None else row.group
        items = torch.zeros(6, 128 // 2 if group else 128, dtype=dtype if row is None else TORCH_DTYPES[row.item])
        self.items = nn.Parameter(items, requires_grad=False)
        if row is not None:
            shape = (6, 2 * 128 // group) if group else (6 if row.is_per_channel else 1,)
            self.scales = nn.Parameter(torch.ones(shape), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scales"):
            return functional.linear(x, self.items)
        product: Tensor = torch.ops.kiln.quantized_linear(x, self.items, self.scales)
        return product


@pytest.mark.parametrize("name", [None, *FORMATS])
@pytest.mark.parametrize("dtype", get_args(get_type_hints(NeuronConfig)["torch_dtype"]))
def test_no_format_pays_for_idle_rows(name: str | None, dtype: DType) -> None:
    """Our kernel skips them, whatever the instruction set; what is left to ATen multiplies the whole bucket."""
    x = torch.ones(4, 128, dtype=TORCH_DTYPES[dtype])
    model = Quantized(None if name is None else FORMATS[name], x.dtype)
    module = torch.export.export(model, (x,)).module()
    ((activations, items),) = use_linear_kernel(module)
    assert (activations, items) == (x.dtype, model.items.dtype)
    assert calls_of(module, torch.ops.aten.linear.default) == 0
    assert calls_of(module, torch.ops.kiln.quantized_linear.default) == 0
    assert name_function(activations, items) in write_kernel_source([(activations, items)])


class QuantizedLayers(nn.Module):
    """Two quantized layers of one input, one with a scale for each output, and one that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        for name, (items, scales) in {"one": (24, 1), "each": (9, 9)}.items():
            weight = draw((torch.float32, torch.int8), items, 40)
            self.register_buffer(f"{name}_items", weight.items)
            self.register_buffer(f"{name}_scales", random(scales).abs() / 40)
        self.dense = nn.Linear(40, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ops.kiln.quantized_linear(x, self.one_items, self.one_scales)
        each = torch.ops.kiln.quantized_linear(x, self.each_items, self.each_scales)
        return torch.cat([one, each, self.dense(x)], -1)


def test_quantized_layers_become_a_call_of_their_own() -> None:
    model, x = QuantizedLayers().requires_grad_(False), random(3, 2, 40)
    module = torch.export.export(model, (x,)).module()
    assert use_linear_kernel(module) == {(torch.float32, torch.float32), (torch.float32, torch.int8)}
    assert calls_of(module, torch.ops.kiln.linear.default) == 2
    torch.testing.assert_close(module(x), model(x))


class Sequences(nn.Module):
    """Layers of sequences, quantized ones, and one that takes only their live tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.quantized, self.counted = Layers(), QuantizedLayers(), nn.Linear(40, 6, bias=False)

    def forward(self, x: Tensor, num_tokens: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        counted = torch.ops.kiln.linear(x + 1, [self.counted.weight], [], num_tokens)
        return (*self.layers(x, last)[:1], self.quantized(x), counted, last + 1)


@pytest.mark.toolchain
def test_a_library_holds_the_kernels(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model = Sequences().requires_grad_(False)
    x, last = random(3, 2, 40), torch.ones(3, 2, 10, dtype=torch.bfloat16)
    num_tokens = torch.tensor([2, 0, 1], dtype=torch.int32)
    executable = lower_module(lowerings, tmp_path, model, (x, num_tokens, last), num_state=1)
    symbols = subprocess.run(
        [require_tool("nm"), "-C", executable.path], capture_output=True, text=True, check=True
    ).stdout
    kernels = {f"kiln_linear_{dtypes}" for dtypes in ("float32", "bfloat16", "float32_int8")}
    assert kernels <= {line.split()[-1] for line in symbols.splitlines()}
    with open_library(executable, model.state_dict()) as library:
        result, quantized, counted = library.run([x, num_tokens, last])
    # Only now: rows that the library left as they were must not lie where these results were.
    expected, expected_quantized, expected_counted, _ = model(x, num_tokens, torch.ones_like(last))
    is_live = torch.arange(2) < num_tokens[:, None]
    torch.testing.assert_close(result, expected)
    # The library rounds activations to 16 bits.
    assert (quantized - expected_quantized).abs().max() / expected_quantized.abs().max() < 1e-4
    torch.testing.assert_close(counted[is_live], expected_counted[is_live])
    assert not counted[~is_live].allclose(expected_counted[~is_live])
    assert last.eq(2).all()
