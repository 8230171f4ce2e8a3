"""The kernel of linear layers by itself."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor

from bench.kernels.candidates import compile_driver
from bundle.abi.formats import GROUPS
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.linear import DtypePair, compile_linear_kernel, name_function
from execution.quantized_linear import dequantize
from targets.cpu import X86_64
from tests.kernel_library import link_kernel, list_isas, load_kernel
from tests.tools import require_tool

#: By the dtypes of activations and weights: each format's items once, and each dtype of activations with one of them.
TOLERANCES: dict[DtypePair, float] = {
    (torch.float32, torch.float32): 3e-6,
    (torch.bfloat16, torch.bfloat16): 8e-3,
    (torch.float16, torch.float16): 1e-3,
    (torch.float32, torch.int8): 5e-6,
    (torch.bfloat16, torch.float8_e4m3fn): 8e-3,
    (torch.float16, torch.float8_e5m2): 1e-3,
    (torch.bfloat16, torch.uint8): 8e-3,
    (torch.float32, torch.uint8): 5e-6,
}
#: Those whose products are of integers, with activations of 16 bits.
INTEGERS: list[DtypePair] = [pair for pair in TOLERANCES if pair[1] in {torch.int8, torch.uint8}]
#: From this number of live rows on, lanes are rows, and sums are added in another order.
MANY_ROWS = 128

Multiply = Callable[..., Tensor]


class Weight(NamedTuple):
    """A weight [outputs, inputs]; scales only if it is quantized. Two items of a group are in a byte."""

    items: Tensor
    scales: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.items.double() if self.scales is None else dequantize(self.items, self.scales).double()


def compile_kernels(job: LoweringJob) -> list[Path]:
    return [compile_linear_kernel(job, pair) for pair in TOLERANCES]


def build_multiply(isa: str) -> Multiply:
    """Compiles the kernel for one instruction set; skips the test if this host lacks it."""
    if isa not in X86_64.list_supported():
        pytest.skip(f"this host has no {isa}")
    functions = load_kernel(isa, compile_kernels)

    def run(
        x: Tensor, weights: Sequence[Weight], threads: int = 2, live: Sequence[int] = (), out: Tensor | None = None
    ) -> Tensor:
        outputs = [len(weight.items) for weight in weights]
        scales = [weight.scales for weight in weights if weight.scales is not None]
        if out is None:
            out = torch.full((len(x), sum(outputs)), float("nan"), dtype=x.dtype)
        functions.set_threads(threads)
        getattr(functions, name_function(x.dtype, weights[0].items.dtype))(
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(x.data_ptr()),
            (ctypes.c_void_p * len(weights))(*(weight.items.data_ptr() for weight in weights)),
            (ctypes.c_void_p * len(scales))(*(one.data_ptr() for one in scales)),
            (ctypes.c_int64 * len(scales))(*map(count_scales, scales)),
            (ctypes.c_int64 * len(weights))(*outputs),
            ctypes.c_int64(len(weights)),
            ctypes.c_int64(len(x)),
            ctypes.c_int64(x.shape[1]),
            (ctypes.c_int32 * len(live))(*live) if live else None,
            ctypes.c_int64(len(live)),
        )
        return out

    return run


@pytest.fixture(scope="module", params=list_isas())
def multiply(request: pytest.FixtureRequest) -> Multiply:
    """The kernel, compiled for one instruction set."""
    return build_multiply(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def count_scales(scales: Tensor) -> int:
    """Scales of an output; 0 if there is one for all of them."""
    return scales.shape[1] if scales.dim() > 1 else int(len(scales) > 1)


def fit(pair: DtypePair, inputs: int) -> int:
    """So many inputs, or a few more that are whole groups."""
    return -(-inputs // GROUPS[-1]) * GROUPS[-1] if pair[1] == torch.uint8 else inputs


def draw(pair: DtypePair, outputs: int, inputs: int) -> Weight:
    """A random weight; a quantized one has one scale if its outputs are even, otherwise one for each, or the largest
    groups that there are.
    """
    activations, dtype = pair
    if dtype == torch.uint8:
        items = torch.randint(256, (outputs, inputs // 2), generator=torch.Generator().manual_seed(outputs + inputs))
        group = next(one for one in GROUPS if inputs % one == 0)
        factors = random(outputs, inputs // group, 1).abs() / 10
        return Weight(items.to(dtype), torch.cat([factors, factors * -7.5], -1).flatten(1))
    if activations == dtype:
        return Weight(random(outputs, inputs, dtype=dtype))
    return Weight((random(outputs, inputs) * 40).to(dtype), random(outputs if outputs % 2 else 1).abs() / 40)


#: Rows, inputs, outputs of each weight.
SHAPES: dict[str, list[tuple[int, int, Sequence[int]]]] = {
    "few rows": [(rows, n, (1, 5, 102, 7)) for rows in range(1, 20) for n in (1, 7, 16, 33, 130, 768)],
    "blocks of inputs": [
        (rows, n, (3, 138, 416)) for rows, n in ((2, 769), (5, 1540), (16, 3072), (128, 2309), (300, 70), (130, 4128))
    ],
    # Rows, inputs and outputs that fill no vector, tile, block or panel.
    "many rows": [
        (rows, n, outputs)
        for rows in (64, 65, 100, 127, 128, 129, 143, 145, 161, 200)
        for n, outputs in ((1, (5, 64)), (33, (1, 102, 7)), (130, (800,)), (769, (49, 6)), (3203, (17,)))
    ],
}


def keep(x: Tensor, pair: DtypePair) -> Tensor:
    """What the kernel multiplies of rows, in float64."""
    if pair not in INTEGERS:
        return x.double()
    largest = x.double().abs().amax(1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(largest), largest.log2().floor().clamp(min=-112) - 14)
    return (x.double() / unit).round().clamp(-32767, 32767) * unit


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_are_those_of_a_wide_product(
    multiply: Multiply, shapes: list[tuple[int, int, Sequence[int]]], pair: DtypePair
) -> None:
    for rows, inputs, outputs in shapes:
        num_inputs = fit(pair, inputs)
        x = random(rows, num_inputs, dtype=pair[0])
        weights = [draw(pair, count, num_inputs) for count in outputs]
        values = torch.cat([weight.values for weight in weights]).T
        expected = keep(x, pair) @ values
        for threads in (1, 2):
            result = multiply(x, weights, threads)
            assert (result - expected).abs().max() / expected.abs().max() < TOLERANCES[pair], (rows, inputs)
        assert (result - x.double() @ values).abs().max() / expected.abs().max() < max(1e-4, TOLERANCES[pair])


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", INTEGERS, ids=lambda pair: name_function(*pair))
def test_integers_of_any_magnitude_neither_overflow_nor_vanish(multiply: Multiply, pair: DtypePair) -> None:
    inputs = 4096
    # The largest sums: of one sign, of items that are the farthest from zero, of magnitudes just below a power of two.
    weight = Weight(torch.full((3, inputs), -128, dtype=torch.int8), torch.tensor([0.25]))
    if pair[1] == torch.uint8:
        groups = torch.tensor([0.25, 1.0]).repeat(3, inputs // GROUPS[0])
        weight = Weight(torch.full((3, inputs // 2), 255, dtype=torch.uint8), groups)
    # Tiles take what is below the least normal number for zero.
    magnitudes = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-125, 96)])
    x = (magnitudes[:, None] * (1 - torch.finfo(pair[0]).eps)).to(pair[0]).repeat(1, inputs)
    expected = keep(x, pair) @ weight.values.T
    for part in (x, *x.split(1)[:: len(x) // 8]):
        first = int((x[:, 0] == part[0, 0]).int().argmax())
        result = multiply(part, [weight]).double()
        torch.testing.assert_close(result, expected[first : first + len(part)], rtol=TOLERANCES[pair], atol=1e-36)
    assert multiply(x, [weight])[0].eq(0).all()


@pytest.mark.toolchain
def test_items_of_quantized_activations_stay_what_they_are(multiply: Multiply) -> None:
    """As `quantize_rows` leaves them: their products are those of integers."""
    items = torch.randint(-128, 128, (130, 640), generator=torch.Generator().manual_seed(0))
    weight = draw((torch.float32, torch.int8), 12, 640)
    expected = (items @ weight.items.long().T) / 128
    for rows in (3, 130):
        result = multiply(items[:rows] / 128, [Weight(weight.items, torch.ones(1))])
        assert result.equal(expected[:rows].float())


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
@pytest.mark.parametrize("inputs", [200, 2309])
def test_a_row_does_not_depend_on_how_many_there_are(multiply: Multiply, pair: DtypePair, inputs: int) -> None:
    inputs = fit(pair, inputs)
    weights = [draw(pair, outputs, inputs) for outputs in (13, 64)]
    x = random(300, inputs, dtype=pair[0])
    few, many = multiply(x[: MANY_ROWS - 1], weights), multiply(x, weights)
    for rows in (*range(1, 20), 64, 65, 126):
        assert multiply(x[:rows], weights).equal(few[:rows]), rows
    for rows in (MANY_ROWS, 129, 144, 145, 200, 257):
        assert multiply(x[:rows], weights).equal(many[:rows]), rows


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
def test_numbers_that_are_none_come_out_as_they_are(multiply: Multiply, pair: DtypePair) -> None:
    inputs = fit(pair, 40)
    x, weight = random(130, inputs, dtype=pair[0]), draw(pair, 20, inputs)
    x[3, 7], x[129, 0] = float("nan"), float("inf")
    result = multiply(x, [weight])
    assert result[3].isnan().all()
    # Integers keep no infinity, and the tiles that multiply many rows of int4 do.
    assert not result[129].isfinite().any() if pair in INTEGERS else result[129].isinf().all()
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
        None, None, (ctypes.c_int64 * 1)(40), ctypes.c_int64(1), ctypes.c_int64(200), ctypes.c_int64(70), None,
        ctypes.c_int64(1))
    results.append(out)
assert results[0].allclose(results[1], rtol=0.02, atol=0.1)
print(results[0].equal(results[1]))
"""


@pytest.mark.toolchain
@pytest.mark.parametrize(("stacks", "equal"), [("small", "True"), ("as they are", "False")])
def test_a_host_that_refuses_tiles_gets_the_numbers_of_the_level_without_them(
    tmp_path: Path, stacks: str, equal: str
) -> None:
    isas = ("x86-64-v4-amx", "x86-64-v4")
    if isas[0] not in X86_64.list_supported():
        pytest.skip(f"this host has no {isas[0]}")
    paths = [link_kernel(tmp_path, isa, compile_kernels) for isa in isas]
    process = subprocess.run(
        [sys.executable, "-c", _REFUSED, *paths, stacks], capture_output=True, text=True, check=False
    )
    assert process.stdout.split() == [equal], process.stderr


@pytest.mark.toolchain
def test_with_tiles_a_row_depends_on_no_number_of_rows() -> None:
    multiply = build_multiply("x86-64-v4-amx")
    for inputs, outputs in ((4128, 96), (200, 77)):
        x, weights = random(300, inputs, dtype=torch.bfloat16), [Weight(random(outputs, inputs, dtype=torch.bfloat16))]
        expected = multiply(x, weights)
        for rows in (1, 2, 16, 17, 33, 127, 128, 257):
            assert multiply(x[:rows], weights).equal(expected[:rows]), rows


#: Instructions that an instruction set has for products of two dtypes, and that the kernel is to use.
INSTRUCTIONS: Final = {
    ("x86-64-v3", ("float32", "int8")): "vpmaddwd",
    ("x86-64-v4", ("float32", "int8")): "vpmaddwd",
    ("x86-64-v4-vnni", ("float32", "int8")): "vpdpwssd",
    ("x86-64-v4-vnni", ("float32", "uint8")): "vpdpwssd",
    ("x86-64-v4-bf16", ("bfloat16", "bfloat16")): "vdpbf16ps",
    ("x86-64-v4-amx", ("bfloat16", "bfloat16")): "tdpbf16ps",
    ("x86-64-v4-amx", ("bfloat16", "int8")): "tdpbf16ps",
}
SHOWN: Final = (("x86-64-v3", ("float32", "int8")), ("x86-64-v4-vnni", ("float32", "int8")))


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("isa", "pair"), [pytest.param(*case, marks=[] if case in SHOWN else [pytest.mark.slow]) for case in INSTRUCTIONS]
)
def test_products_are_those_of_the_instruction_set(tmp_path: Path, isa: str, pair: tuple[str, str]) -> None:
    program = compile_driver("linear", X86_64[isa], pair, tmp_path)
    command = [require_tool("objdump"), "-d", "--no-show-raw-insn", program]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    register = "tmm" if INSTRUCTIONS[isa, pair].startswith("t") else "ymm" if isa == "x86-64-v3" else "zmm"
    assert re.search(rf"\b{INSTRUCTIONS[isa, pair]} .*%{register}", code)


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
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
def test_nothing_is_touched_behind_activations_weights_and_results(multiply: Multiply, pair: DtypePair) -> None:
    for rows in (1, 2, 7, 127, 128, 131, 150):
        for least, outputs in ((1, 1), (33, 13), (64, 48), (95, 50), (770, 64)):
            inputs = fit(pair, least)
            x, weight = Guarded(random(rows, inputs, dtype=pair[0])), draw(pair, outputs, inputs)
            held = [None if one is None else Guarded(one) for one in weight]
            out = Guarded(torch.zeros(rows, outputs, dtype=pair[0]))
            multiply(x.tensor, [Weight(*(one and one.tensor for one in held))], out=out.tensor)
            assert out.tensor.equal(multiply(x.tensor.clone(), [weight])), (rows, inputs, outputs)


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
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
def test_only_live_rows_are_written(multiply: Multiply, rows: int, live: Sequence[int], pair: DtypePair) -> None:
    inputs = fit(pair, 70)
    weights = [draw(pair, outputs, inputs) for outputs in (13, 64)]
    x = random(rows, inputs, dtype=pair[0])
    is_live = torch.cat([torch.arange(rows // len(live)) < count for count in live])
    expected = multiply(x[is_live], weights) if is_live.any() else torch.empty(0, 77)
    results = multiply(x, weights, live=live)
    assert results[is_live].equal(expected)
    assert results[~is_live].isnan().all()


@pytest.mark.toolchain
@pytest.mark.parametrize("pair", TOLERANCES, ids=lambda pair: name_function(*pair))
@pytest.mark.parametrize("rows", [2, 3, 5, 7, 16, 130, 300])
@pytest.mark.parametrize("inputs", [200, 2309])
def test_a_row_depends_on_no_other_row_and_not_on_the_threads(
    multiply: Multiply, rows: int, inputs: int, pair: DtypePair
) -> None:
    inputs = fit(pair, inputs)
    weights = [draw(pair, outputs, inputs) for outputs in (13, 64)]
    x = random(rows, inputs, dtype=pair[0])
    expected = multiply(x, weights, 1)
    for threads in (2, 3):
        assert multiply(x, weights, threads).equal(expected)
    for row in range(0, rows, max(1, rows // 16)):
        other = torch.full_like(x, float("inf"))
        other[row] = x[row]
        assert multiply(other, weights)[row].equal(expected[row])
