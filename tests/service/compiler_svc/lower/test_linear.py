"""The kernel by itself, the graphs that call it, and a library that holds it."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from bundle.manifest import Target
from compiler_svc.lower.job import LoweringOptions
from compiler_svc.lower.linear import name_function, use_linear_kernel, write_kernel_source
from compiler_svc.lower.pool import LoweringPool
from compiler_svc.lower.program import stage_job
from compiler_svc.planning.code_digest import LOWERING_CODE, digest_code
from execution.executors.aoti_library import AotiLibrary
from execution.forkserver.client import ForkserverClient
from targets.cpu import X86_64
from tests.kernel_library import load_kernel
from tests.lowering_cache import LOWERING_CACHE
from tests.tools import require_tool

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
#: From this number of live rows on, lanes are rows, and sums are added in another order.
MANY_ROWS = 128

Multiply = Callable[..., Tensor]


#: The instruction sets for which the kernel's code differs.
ISAS = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx")


def build_multiply(isa: str) -> Multiply:
    """Compiles the kernel for one instruction set; skips the test if this host lacks it."""
    if isa not in X86_64.list_supported():
        pytest.skip(f"this host has no {isa}")
    functions = load_kernel("linear", write_kernel_source(), isa)

    def run(
        x: Tensor, weights: Sequence[Tensor], threads: int = 2, live: Sequence[int] = (), out: Tensor | None = None
    ) -> Tensor:
        outputs = [weight.shape[0] for weight in weights]
        if out is None:
            out = torch.full((len(x), sum(outputs)), float("nan"), dtype=x.dtype)
        functions.set_threads(threads)
        getattr(functions, name_function(x.dtype))(
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(x.data_ptr()),
            (ctypes.c_void_p * len(weights))(*(weight.data_ptr() for weight in weights)),
            (ctypes.c_int64 * len(weights))(*outputs),
            ctypes.c_int64(len(weights)),
            ctypes.c_int64(len(x)),
            ctypes.c_int64(x.shape[1]),
            (ctypes.c_int32 * len(live))(*live) if live else None,
            ctypes.c_int64(len(live)),
        )
        return out

    return run


# The second multiplies as the first does, in vectors as wide as the third's: the long run has it.
@pytest.fixture(
    scope="module", params=[pytest.param(isa, marks=[pytest.mark.slow] * (isa == "x86-64-v4")) for isa in ISAS]
)
def multiply(request: pytest.FixtureRequest) -> Multiply:
    """The kernel, compiled for one instruction set."""
    return build_multiply(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_are_those_of_a_wide_product(multiply: Multiply, dtype: torch.dtype) -> None:
    for rows in range(1, 20):
        for inputs in (1, 7, 16, 33, 130, 768):
            x = random(rows, inputs, dtype=dtype)
            weights = [random(outputs, inputs, dtype=dtype) for outputs in (1, 5, 102, 7)]
            expected = x.double() @ torch.cat(weights).double().T
            error = (multiply(x, weights) - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCES[dtype], (rows, inputs)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_are_those_of_a_wide_product_in_blocks_of_inputs(multiply: Multiply, dtype: torch.dtype) -> None:
    for rows, inputs in ((2, 769), (5, 1540), (16, 3072), (128, 2309), (300, 70), (130, 4128)):
        x = random(rows, inputs, dtype=dtype)
        weights = [random(outputs, inputs, dtype=dtype) for outputs in (3, 138, 416)]
        expected = x.double() @ torch.cat(weights).double().T
        error = (multiply(x, weights) - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCES[dtype], (rows, inputs)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_of_many_rows_are_those_of_a_wide_product(multiply: Multiply, dtype: torch.dtype) -> None:
    """Of rows, inputs and outputs that fill no vector, tile, block or panel."""
    for rows in (64, 65, 100, 127, 128, 129, 143, 145, 161, 200):
        for inputs, outputs in ((1, (5, 64)), (33, (1, 102, 7)), (130, (800,)), (769, (49, 6)), (3203, (17,))):
            x = random(rows, inputs, dtype=dtype)
            weights = [random(count, inputs, dtype=dtype) for count in outputs]
            expected = x.double() @ torch.cat(weights).double().T
            for threads in (1, 2):
                error = (multiply(x, weights, threads) - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCES[dtype], (rows, inputs)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("inputs", [200, 2309])
def test_a_row_does_not_depend_on_how_many_there_are(multiply: Multiply, dtype: torch.dtype, inputs: int) -> None:
    weights = [random(outputs, inputs, dtype=dtype) for outputs in (13, 64)]
    x = random(300, inputs, dtype=dtype)
    few, many = multiply(x[: MANY_ROWS - 1], weights), multiply(x, weights)
    for rows in (*range(1, 20), 64, 65, 126):
        assert multiply(x[:rows], weights).equal(few[:rows]), rows
    for rows in (MANY_ROWS, 129, 144, 145, 200, 257):
        assert multiply(x[:rows], weights).equal(many[:rows]), rows


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_numbers_that_are_none_come_out_as_they_are(multiply: Multiply, dtype: torch.dtype) -> None:
    x, weight = random(130, 40, dtype=dtype), random(20, 40, dtype=dtype)
    x[3, 7], x[129, 0] = float("nan"), float("inf")
    result = multiply(x, [weight])
    assert result[3].isnan().all()
    assert result[129].isinf().all()
    assert result[[*range(3), *range(4, 129)]].isfinite().all()


#: Compares the kernel for tiles with the one without them, if need be with a stack for signals that is too small for
#: tiles: then Linux lets the process use none.
_REFUSED = """
import ctypes, mmap, sys
import torch
libc = ctypes.CDLL(None, use_errno=True)
class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
held = ctypes.create_string_buffer(4096)
torch.manual_seed(0)
x, weight = torch.randn(200, 70).bfloat16(), torch.randn(40, 70).bfloat16()
if sys.argv[3] == "small":
    assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(held), 0, 4096)), None) == 0, ctypes.get_errno()
results = []
for path in sys.argv[1:3]:
    out = torch.zeros(200, 40, dtype=torch.bfloat16)
    ctypes.CDLL(path).kiln_linear_bfloat16(
        ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(x.data_ptr()), (ctypes.c_void_p * 1)(weight.data_ptr()),
        (ctypes.c_int64 * 1)(40), ctypes.c_int64(1), ctypes.c_int64(200), ctypes.c_int64(70), None, ctypes.c_int64(1))
    results.append(out)
assert results[0].allclose(results[1], rtol=0.02, atol=0.1)
print(results[0].equal(results[1]))
"""


@pytest.mark.toolchain
@pytest.mark.parametrize(("stacks", "equal"), [("small", "True"), ("as they are", "False")])
def test_a_host_that_refuses_tiles_gets_the_numbers_of_the_level_without_them(stacks: str, equal: str) -> None:
    isas = ("x86-64-v4-amx", "x86-64-v4")
    if isas[0] not in X86_64.list_supported():
        pytest.skip(f"this host has no {isas[0]}")
    paths = [load_kernel("linear", write_kernel_source(), isa)._name for isa in isas]
    process = subprocess.run(
        [sys.executable, "-c", _REFUSED, *paths, stacks], capture_output=True, text=True, check=False
    )
    assert process.stdout.split() == [equal], process.stderr


@pytest.mark.toolchain
def test_with_tiles_a_row_depends_on_no_number_of_rows() -> None:
    multiply = build_multiply("x86-64-v4-amx")
    for inputs, outputs in ((4128, 96), (200, 77)):
        x, weights = random(300, inputs, dtype=torch.bfloat16), [random(outputs, inputs, dtype=torch.bfloat16)]
        expected = multiply(x, weights)
        for rows in (1, 2, 16, 17, 33, 127, 128, 257):
            assert multiply(x[:rows], weights).equal(expected[:rows]), rows


class Guarded:
    """Memory of a tensor behind whose end nothing may be touched: a touch ends this process."""

    def __init__(self, values: Tensor) -> None:
        size = values.numel() * values.element_size()
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
        end = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + pages
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        held = (ctypes.c_char * size).from_address(end - size)
        self.tensor = torch.frombuffer(held, dtype=values.dtype).view(values.shape)
        self.tensor.copy_(values)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nothing_is_touched_behind_activations_weights_and_results(multiply: Multiply, dtype: torch.dtype) -> None:
    for rows in (1, 2, 7, 127, 128, 131, 150):
        for inputs, outputs in ((1, 1), (33, 13), (64, 48), (95, 50), (770, 64)):
            x, weight = Guarded(random(rows, inputs, dtype=dtype)), Guarded(random(outputs, inputs, dtype=dtype))
            out = Guarded(torch.zeros(rows, outputs, dtype=dtype))
            multiply(x.tensor, [weight.tensor], out=out.tensor)
            assert out.tensor.equal(multiply(x.tensor.clone(), [weight.tensor.clone()])), (rows, inputs, outputs)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("rows", "live"),
    [
        (4, [0]),
        (4, [1]),
        (4, [2]),
        (300, [137]),
        (4, [4]),
        (3, [1, 0, 1]),
        (40, [1, 20]),
        (160, [3, 0, 40, 39]),
        (320, [30, 0, 79, 41]),
        (6, [0, 0]),
    ],
)
def test_only_live_rows_are_written(multiply: Multiply, rows: int, live: Sequence[int], dtype: torch.dtype) -> None:
    weights = [random(outputs, 70, dtype=dtype) for outputs in (13, 64)]
    x = random(rows, 70, dtype=dtype)
    is_live = torch.cat([torch.arange(rows // len(live)) < count for count in live])
    expected = multiply(x[is_live], weights) if is_live.any() else torch.empty(0, 77)
    results = multiply(x, weights, live=live)
    assert results[is_live].equal(expected)
    assert results[~is_live].isnan().all()


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [2, 3, 5, 7, 16, 130, 300])
@pytest.mark.parametrize("inputs", [200, 2309])
def test_a_row_depends_on_no_other_row_and_not_on_the_threads(
    multiply: Multiply, rows: int, inputs: int, dtype: torch.dtype
) -> None:
    weights = [random(outputs, inputs, dtype=dtype) for outputs in (13, 64)]
    x = random(rows, inputs, dtype=dtype)
    expected = multiply(x, weights, 1)
    for threads in (2, 3):
        assert multiply(x, weights, threads).equal(expected)
    for row in range(0, rows, max(1, rows // 16)):
        other = torch.full_like(x, float("inf"))
        other[row] = x[row]
        assert multiply(other, weights)[row].equal(expected[row])


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
    assert use_linear_kernel(module, ISAS[0]) == 2
    assert calls_of(module, torch.ops.kiln.linear.default) == 2
    assert calls_of(module, torch.ops.aten.linear.default) == 0
    torch.testing.assert_close(module(x, last)[0], expected)


def test_layers_that_take_what_a_layer_gives() -> None:
    """As OPT's head takes what its output projection gives."""
    model, x = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 9, bias=False), nn.Linear(9, 10)), random(3, 40)
    module = torch.export.export(model, (x,)).module()
    expected = module(x)
    assert use_linear_kernel(module, ISAS[0]) == 3
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
    assert use_linear_kernel(module, ISAS[0], {2: live, 10: num_tokens}) == 2
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.kiln.linear.default)
    assert [call.args[2] for call in calls] == [num_tokens, live]


def test_layers_of_computed_weights_stay() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.float())

    module = torch.export.export(Computed(), (torch.ones(2, 8),)).module()
    assert use_linear_kernel(module, ISAS[0]) == 0
    assert calls_of(module, torch.ops.aten.linear.default) == 1


class Sequences(nn.Module):
    """Layers of sequences, and one that takes only their live tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.counted = Layers(), nn.Linear(40, 6, bias=False)

    def forward(self, x: Tensor, num_tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counted = torch.ops.kiln.linear(x + 1, [self.counted.weight], num_tokens)
        return (*self.layers(x, last)[:1], counted, last + 1)


@pytest.mark.toolchain
def test_a_library_holds_the_kernel(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model = Sequences().requires_grad_(False)
    x, last = random(3, 2, 40), torch.ones(3, 2, 10, dtype=torch.bfloat16)
    num_tokens = torch.tensor([2, 0, 1], dtype=torch.int32)
    job = stage_job(
        torch.export.export(model, (x, num_tokens, last)),
        tag="layers",
        num_state=1,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa="x86-64-v3")),
        directory=tmp_path / "layers",
        cache_dir=LOWERING_CACHE,
    )
    (executable,) = asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    symbols = subprocess.run(
        [require_tool("nm"), "-C", executable.path], capture_output=True, text=True, check=True
    ).stdout
    assert {"kiln_linear_float32", "kiln_linear_bfloat16"} <= {line.split()[-1] for line in symbols.splitlines()}
    library = AotiLibrary(executable.path)
    library.bind_constants(model.state_dict())
    library.swap_constants()
    expected, expected_counted, _ = model(x, num_tokens, last)
    result, counted = library.run([x, num_tokens, last])
    is_live = torch.arange(2) < num_tokens[:, None]
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(counted[is_live], expected_counted[is_live])
    assert not counted[~is_live].allclose(expected_counted[~is_live])
    assert last.eq(2).all()
    library.close()


@pytest.mark.parametrize("file", ["linear.cpp", "linear_many.h", "linear_tiles.h", "products.h"])
def test_the_kernels_source_is_part_of_cache_keys(tmp_path: Path, file: str) -> None:
    kernels = tmp_path / "compiler_svc" / "lower" / "kernels"
    kernels.mkdir(parents=True)
    digests = []
    for text in ("// one", "// two"):
        (kernels / file).write_text(text)
        digest_code.cache_clear()
        digests.append(digest_code(LOWERING_CODE, tmp_path))
    digest_code.cache_clear()
    assert digests[0] != digests[1]
