"""The kernel that adds adapters, by itself, and the libraries that call it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.lower.adapt import compile_adapt_kernel, name_function
from compiler_svc.lower.job import LiveInputs
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import ALL_LINEAR, Adapters, ModelChanges
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import ExecutableSpec
from execution.forkserver.client import ForkserverClient
from targets.cpu import X86_64
from tests.checkpoints.tiny_models import TOLERANCE, deviation, write_tiny_model
from tests.kernel_library import list_isas, load_kernel
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.adapter_batches import RANKS, ROWS, draw_adapters, generate_on_ranks
from tests.ranks.stepping import Run
from tests.service.compiler_svc.lower.libraries import lower, open_library

NUM_SLOTS = 5
#: Of the largest magnitude: as many digits as the dtype has.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module", params=list_isas(("x86-64-v3", "x86-64-v4")))
def functions(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param not in X86_64.list_supported():
        pytest.skip(f"this host has no {request.param}")
    return load_kernel(request.param, lambda job: [compile_adapt_kernel(job, dtype) for dtype in TOLERANCES])


def make_adapters(dtype: torch.dtype, *, inputs: int, outputs: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(NUM_SLOTS, rank, inputs, generator=generator) / inputs**0.5
    return a.to(dtype), torch.randn(NUM_SLOTS, outputs, rank, generator=generator).to(dtype)


def make_rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def adapt(
    functions: ctypes.CDLL, rows: Tensor, a: Tensor, b: Tensor, slots: list[int], *, live: list[int] | None = None
) -> Tensor:
    """What the kernel adds to zeros, and NaN in rows that are not live."""
    out = torch.full((*rows.shape[:-1], b.shape[1]), torch.nan, dtype=rows.dtype)
    for row, count in enumerate([rows.shape[1]] * len(rows) if live is None else live):
        out[row, :count] = 0
    add(functions, out, rows, [(a, b)], slots, live=live)
    return out


def add(
    functions: ctypes.CDLL,
    out: Tensor,
    rows: Tensor,
    layers: list[tuple[Tensor, Tensor]],
    slots: list[int],
    *,
    live: list[int] | None = None,
) -> None:
    """Adds what adapters of several layers make of rows, to outputs side by side."""
    sequences, tokens, inputs = rows.shape
    outputs = [b.shape[1] for _, b in layers]
    pointers = [(ctypes.c_void_p * len(layers))(*(one.data_ptr() for one in own)) for own in zip(*layers, strict=True)]
    sizes = [(ctypes.c_int64 * len(layers))(*own) for own in (outputs, accumulate([0, *outputs[:-1]]))]
    functions.set_threads(2)
    getattr(functions, name_function(rows.dtype))(
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.shape[-1]),
        ctypes.c_void_p(rows.data_ptr()),
        *pointers,
        *sizes,
        ctypes.c_int64(len(layers)),
        (ctypes.c_int32 * len(slots))(*slots),
        *(ctypes.c_int64(size) for size in (sequences, tokens, inputs, layers[0][0].shape[1])),
        None if live is None else (ctypes.c_int32 * len(live))(*live),
        ctypes.c_int64(1 if live is None else len(live)),
    )


def add_exactly(rows: Tensor, a: Tensor, b: Tensor, slots: list[int]) -> Tensor:
    wide = [rows.double(), a.double(), b.double()]
    added = [wide[0][row] @ wide[1][slot].T @ wide[2][slot].T * (slot >= 0) for row, slot in enumerate(slots)]
    return torch.stack(added)


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("slots", "tokens", "inputs", "outputs", "rank"),
    [
        ([3], 1, 768, 640, 16),
        ([0, 1, 2, 3, 4, -1], 1, 40, 33, 3),
        ([4, -1, 4], 7, 129, 65, 1),
        ([1, 1, 0, 0], 5, 64, 64, 64),
        ([2, 2], 3, 5, 7, 20),
        ([-1, -1], 4, 8, 8, 8),
    ],
)
def test_sums_are_those_of_float64(
    functions: ctypes.CDLL, dtype: torch.dtype, slots: list[int], *, tokens: int, inputs: int, outputs: int, rank: int
) -> None:
    rows = make_rows(dtype, len(slots), tokens, inputs)
    a, b = make_adapters(dtype, inputs=inputs, outputs=outputs, rank=rank)
    found, expected = adapt(functions, rows, a, b, slots), add_exactly(rows, a, b, slots)
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))
    )
    assert not found[[slot < 0 for slot in slots]].any()


@pytest.mark.toolchain
def test_a_row_does_not_depend_on_others(functions: ctypes.CDLL) -> None:
    rows = make_rows(torch.float32, 6, 5, 70)
    a, b = make_adapters(torch.float32, inputs=70, outputs=30, rank=9)
    slots = [2, 0, -1, 2, 4, 0]
    together = adapt(functions, rows, a, b, slots)
    for row, slot in enumerate(slots):
        for token in range(5):
            alone = adapt(functions, rows[row : row + 1, token : token + 1].contiguous(), a, b, [slot])
            assert torch.equal(alone[0, 0], together[row, token])


@pytest.mark.toolchain
def test_rows_that_are_not_live_stay_unwritten(functions: ctypes.CDLL) -> None:
    rows = make_rows(torch.float32, 4, 6, 16)
    a, b = make_adapters(torch.float32, inputs=16, outputs=20, rank=4)
    slots, live = [1, -1, 3, 1], [6, 2, 0, 3]
    whole, part = adapt(functions, rows, a, b, slots), adapt(functions, rows, a, b, slots, live=live)
    for row, count in enumerate(live):
        assert torch.equal(part[row, :count], whole[row, :count])
        assert part[row, count:].isnan().all()


@pytest.mark.toolchain
def test_layers_lie_side_by_side(functions: ctypes.CDLL) -> None:
    """Of 40 rows of one adapter, 9 of another and some without, in a call of three layers."""
    rows, slots = make_rows(torch.float32, 13, 7, 50), [3] * 6 + [-1, 0, -1, 3, 3, 3, 3]
    layers = [make_adapters(torch.float32, inputs=50, outputs=outputs, rank=18) for outputs in (16, 45, 7)]
    before = make_rows(torch.float32, 13, 7, 70)
    out = before.clone()
    add(functions, out, rows, layers, slots)
    expected = torch.cat([add_exactly(rows, *layer, slots) for layer in layers], -1)
    torch.testing.assert_close(out[..., :68], (before[..., :68] + expected).float(), rtol=0, atol=1e-4)
    assert torch.equal(out[..., 68:], before[..., 68:])
    assert torch.equal(out[[6, 8]], before[[6, 8]])


class Adapted(nn.Module):
    """A layer with room for adapters, beside its input."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False)

    def forward(self, ids: Tensor, hidden: Tensor, adapter_ids: Tensor, live_rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + ids[:, :, None]
        return hidden * 2 + torch.ops.kiln.adapt(hidden, self.lora_A, self.lora_B, adapter_ids), live_rows + 1


@pytest.mark.toolchain
def test_libraries_call_the_kernel(lowerings: ForkserverClient, tmp_path: Path) -> None:
    a, b = make_adapters(torch.float32, inputs=24, outputs=24, rank=5)
    ids, hidden = torch.ones(3, 2, dtype=torch.int32), make_rows(torch.float32, 3, 2, 24)
    slots, live = torch.tensor([4, -1, 0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    inputs = [ids, hidden, slots, live]
    program = torch.export.export(Adapted(a, b), tuple(inputs))
    executable = lower(lowerings, tmp_path, program, num_state=0, live=LiveInputs(rows=3, tokens=0))
    with open_library(executable, {"lora_A": a, "lora_B": b}) as library:
        found, _ = library.run(inputs)
    expected = (hidden + 1) * 2 + add_exactly(hidden + 1, a, b, slots.tolist()).float()
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-5)


@pytest.mark.toolchain
def test_compiled_models(lowerings: ForkserverClient, tmp_path: Path) -> None:
    """Prompts and tokens of five adapters and none, in one batch."""
    tiny = write_tiny_model(tmp_path / "model", LLAMA_GEOMETRIES["gqa2-tied-linear"])
    room = Adapters(slots=AdapterSlots(slots=len(RANKS), rank=max(RANKS)), targets=(ALL_LINEAR,))
    description = ModelChanges(fuses_qkv=True, adapters=room).apply(describe_model(tiny.checkpoint.config))
    num_rows = len(ROWS)
    spec = tiny.spec(
        description=description, num_slots=num_rows, ctx_batch_size=num_rows, tkg_batch_size=num_rows, skips_idle=True
    )
    adapters, slots = draw_adapters(description), torch.tensor([slot for slot, _ in ROWS], dtype=torch.int32)
    with ExitStack() as libraries:

        def run_library(_: Any, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, Tensor]) -> Run:
            traced, num_inputs = export_submodel(spec, plan, submodel), len(submodel.inputs)
            live, directory = find_live_inputs(submodel), tmp_path / submodel.tag
            executable = lower(lowerings, directory, traced.program, num_state=len(submodel.state), live=live)
            weights = {one.name: shard[one.tensor] for one in traced.constants}
            library = libraries.enter_context(open_library(executable, weights))
            return lambda *arguments: (*library.run(arguments), *arguments[num_inputs:])

        (compiled,) = generate_on_ranks(tiny, spec, adapters, slots, run_library)
    (expected,) = generate_on_ranks(tiny, spec, adapters, slots)
    assert deviation(compiled, expected) < TOLERANCE
