"""The attention kernel's contract: every option against the reference in torch, for each instruction set."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import eager_attention_forward

import execution.attention.operators  # noqa: F401 - registers the reference
from targets.cpu import X86_64
from tests.attention.kernel import PAIRS, AttendKernel
from tests.attention.steps import CASES, AttentionStep
from tests.covering import cover
from tests.kernel_library import ISAS, list_isas

pytestmark = pytest.mark.toolchain

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
#: Whatever may go wrong together. Blocks of 48 and 100 positions end within the kernel's tiles.
FACTORS: dict[str, list[Any]] = {
    "pair": list(PAIRS),
    "head_dim": [24, 80, 96, 128, 256],
    "heads": [(2, 2), (6, 2), (7, 1), (8, 2), (20, 2)],
    "tokens": [(1, 1, 0), (3, 1, 2), (40, 0, 17), (60, 5, 33)],
    "cached": [(0, 0, 0), (1, 63, 7), (20, 140, 64)],
    "block_tokens": [1, 16, 48, 100, 208],
    "window": [0, 1, 50],
    "sinks": [False, True],
    "slopes": [False, True],
    "soft_cap": [0.0, 1.5],
    "tree": ["none", "one", "each"],
    "is_joined": [False, True],
}
LONGEST = 208


@pytest.fixture(scope="module", params=list_isas(ISAS[:3]))
def kernel(request: pytest.FixtureRequest) -> AttendKernel:
    if request.param not in X86_64.list_supported():
        pytest.skip(f"this host has no {request.param}")
    return AttendKernel(request.param)


def make_step(case: dict[str, Any]) -> AttentionStep:
    heads, kv_heads = case["heads"]
    most = max(case["tokens"])
    generator = torch.Generator().manual_seed(3)
    # A tree's token sees itself and, of those before it, some.
    trees = (torch.rand(len(case["tokens"]), most, most, generator=generator) < 0.4).tril() | torch.eye(most).bool()
    return AttentionStep(
        case["cached"],
        case["tokens"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=case["head_dim"],
        block_tokens=case["block_tokens"],
        blocks_per_row=-(-LONGEST // case["block_tokens"]),
        dtype=case["pair"][0],
        cache_dtype=case["pair"][1],
        sinks=torch.randn(heads, generator=generator) if case["sinks"] else None,
        slopes=torch.rand(heads, generator=generator) / 8 if case["slopes"] else None,
        tree_mask={"none": None, "one": trees[0], "each": trees}[case["tree"]],
        is_joined=case["is_joined"],
        options={"window": case["window"], "soft_cap": case["soft_cap"]},
    )


def assert_like_the_reference(kernel: AttendKernel, step: AttentionStep, threads: int = 2) -> None:
    arguments, options = step.make_arguments(), step.make_options()
    expected, *caches = torch.ops.kiln.attend(*arguments, **options)
    attended = kernel.attend(arguments, options, threads)
    is_live = step.make_positions() >= 0
    error = (attended - expected)[is_live].float().abs().max() / expected.float().abs().max()
    assert error < TOLERANCES[step.dtype]
    assert attended[~is_live].isnan().all(), "a token without a position cost something"
    assert_caches_equal(arguments[3:5], caches)


def assert_caches_equal(caches: list[Tensor], expected: list[Tensor]) -> None:
    """torch compares no float8."""
    for cache, other in zip(caches, expected, strict=True):
        assert cache.float().equal(other.float())


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_kernel_does_what_the_reference_does(kernel: AttendKernel, step: AttentionStep) -> None:
    assert_like_the_reference(kernel, step)


_BYTES = torch.arange(127, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "kept", "values", "bounds"),
    [
        (torch.float32, torch.float8_e4m3fn, _BYTES.view(torch.float8_e4m3fn).float(), (-240, 240)),
        (torch.bfloat16, torch.float8_e4m3fn, _BYTES.view(torch.float8_e4m3fn).float(), (-240, 240)),
        (torch.float32, torch.int8, _BYTES.float(), (-128, 127)),
    ],
)
def test_bytes_are_rounded_as_torch_rounds_them(
    kernel: AttendKernel, dtype: torch.dtype, kept: torch.dtype, values: Tensor, bounds: tuple[int, int]
) -> None:
    """All of their values, what lies halfway between them and beside that, and what is beyond the largest."""
    halves = (values[1:] + values[:-1]) / 2
    magnitudes = torch.cat([values, halves, halves * 1.01, halves * 0.99, torch.tensor([1e-30, 1e30, float("inf")])])
    invalid = torch.tensor([float("nan")] * kept.is_floating_point)
    written = torch.cat([magnitudes, -magnitudes, invalid]).to(dtype)
    written = torch.nn.functional.pad(written, (0, -len(written) % 64)).view(1, -1, 1, 64)
    tokens = written.shape[1]
    step = AttentionStep(
        (0,), (tokens,), heads=1, kv_heads=1, head_dim=64, block_tokens=tokens, blocks_per_row=1, dtype=dtype,
        cache_dtype=kept,
    )  # fmt: skip
    arguments = step.make_arguments()
    arguments[1], arguments[2] = written, -written
    kernel.attend(arguments, step.make_options())
    block = int(arguments[6][0, 0])
    for cache, tokens_written in zip(arguments[3:5], (written, -written), strict=True):
        clipped = tokens_written[0, :, 0].float().clamp(*bounds)
        expected = (clipped if kept.is_floating_point else clipped.round()).to(kept).float()
        torch.testing.assert_close(cache[block, 0].float(), expected, rtol=0, atol=0, equal_nan=True)


def test_all_pairs_of_options_go_together(kernel: AttendKernel) -> None:
    for case in cover(FACTORS):
        try:
            assert_like_the_reference(kernel, make_step(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
def test_all_triples_of_options_go_together(kernel: AttendKernel) -> None:
    for case in cover(FACTORS, strength=3):
        try:
            assert_like_the_reference(kernel, make_step(case), threads=1)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def step_of_length(length: int, tokens: int, **options: Any) -> AttentionStep:
    """One row that ends with position `length - 1`."""
    return AttentionStep(
        (length - tokens,), (tokens,), head_dim=64, block_tokens=64, blocks_per_row=-(-length // 64), **options
    )


@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 127, 128, 129, 512, 513, 1025])
def test_lengths_around_the_kernels_bounds(kernel: AttendKernel, length: int) -> None:
    assert_like_the_reference(kernel, step_of_length(length, 1))
    assert_like_the_reference(kernel, step_of_length(length, min(length, 20)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_lengths(kernel: AttendKernel) -> None:
    head_dims = cycle([64, *FACTORS["head_dim"]])
    for length in (*range(1, 140), *range(140, 700, 11), *range(700, 4096, 131), 4095, 4096):
        for tokens in {1, min(length, 5), min(length, 33), length if length < 140 or length == 4096 else 1}:
            assert_like_the_reference(kernel, replace(step_of_length(length, tokens), head_dim=next(head_dims)))


@pytest.mark.parametrize(("tokens", "spread"), [(200, 1.0), (1100, 4.0)])
def test_bfloat16_errs_less_than_transformers(kernel: AttendKernel, tokens: int, spread: float) -> None:
    """Weights may be rounded, as transformers rounds them; scores, which it rounds as well, may not."""
    step = AttentionStep(
        (0,), (tokens,), head_dim=64, block_tokens=tokens, blocks_per_row=1, dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
    )  # fmt: skip
    arguments, options = step.make_arguments(), step.make_options()
    arguments[0] *= spread
    attended = kernel.attend(arguments, options)
    heads = [tensor.transpose(1, 2) for tensor in arguments[:3]]
    exact = attend_like_transformers(*(tensor.double() for tensor in heads), options["scale"])
    rounded = attend_like_transformers(*heads, options["scale"])
    error, error_of_transformers = ((one.double() - exact).square().mean().sqrt() for one in (attended, rounded))
    assert error < 0.75 * error_of_transformers


def attend_like_transformers(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """A causal prompt [rows, heads, tokens, head_dim] by the eager attention of transformers."""
    model = nn.Module().eval()
    model.num_key_value_groups = queries.shape[1] // keys.shape[1]
    tokens = queries.shape[2]
    mask = torch.full((tokens, tokens), torch.finfo(queries.dtype).min, dtype=queries.dtype).triu(1)
    attended: Tensor = eager_attention_forward(model, queries, keys, values, mask[None, None], scale)[0]
    return attended


def make_ring(length: int, tokens: int) -> AttentionStep:
    """Windows of 40 in a ring that holds no position more than it must."""
    options = {"window": 40, "max_context": 4096}
    ring = 40 + tokens - 1
    return replace(step_of_length(length, tokens, options=options), block_tokens=ring, blocks_per_row=1)


@pytest.mark.parametrize("tokens", [1, 3, 20, 70])
def test_rings_hold_windows(kernel: AttendKernel, tokens: int) -> None:
    for length in (tokens, 100, 300, 1000):
        assert_like_the_reference(kernel, make_ring(length, tokens))


ROWS = AttentionStep(
    (0, 700, 33, 1300, 5), (7, 3, 0, 7, 1), heads=6, kv_heads=2, head_dim=80, block_tokens=48, blocks_per_row=28
)
#: Steps for both ways of the kernel.
MANY = replace(ROWS, tokens=(40, 3, 0, 23, 1))
FEW_AND_MANY = {
    "few tokens": ROWS,
    "many tokens": MANY,
    "many tokens in bfloat16": replace(MANY, dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("step", FEW_AND_MANY.values(), ids=FEW_AND_MANY)
def test_bits_depend_neither_on_threads_nor_on_other_rows(kernel: AttendKernel, step: AttentionStep) -> None:
    options = step.make_options()
    is_live = step.make_positions() >= 0
    expected = kernel.attend(step.make_arguments(), options, threads=1)
    for threads in (2, 3, 7):
        assert kernel.attend(step.make_arguments(), options, threads)[is_live].equal(expected[is_live])
    for row in range(len(step.cached)):
        arguments = step.make_arguments()
        others = [other for other in range(len(step.cached)) if other != row]
        for tensor in arguments[:3]:
            tensor[others] = float("inf")
        arguments[5][others[1:]] = -1
        assert kernel.attend(arguments, options)[row, is_live[row]].equal(expected[row, is_live[row]])
        alone = [tensor[row : row + 1] for tensor in step.make_arguments()[:3]]
        rest = [tensor[row : row + 1] for tensor in step.make_arguments()[5:7]]
        attended = kernel.attend([*alone, *step.make_arguments()[3:5], *rest, None, None, None], options)
        assert attended[0, is_live[row]].equal(expected[row, is_live[row]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 90])
def test_bits_of_a_prompt_do_not_depend_on_its_division(kernel: AttendKernel, window: int, dtype: torch.dtype) -> None:
    whole = AttentionStep(
        (0,), (1300,), heads=6, kv_heads=2, head_dim=64, block_tokens=1536, blocks_per_row=1, options={"window": window}
    )
    whole = replace(whole, dtype=dtype, cache_dtype=dtype)
    options = whole.make_options()
    expected = kernel.attend(whole.make_arguments(), options)
    arguments = whole.make_arguments()
    for begin, end in ((0, 100), (100, 117), (117, 300), (300, 1100), (1100, 1300)):
        part = [tensor[:, begin:end].contiguous() for tensor in arguments[:3]]
        positions = torch.arange(begin, end, dtype=torch.int32)[None]
        attended = kernel.attend([*part, *arguments[3:5], positions, *arguments[6:]], options)
        assert attended.equal(expected[:, begin:end])


class GuardedCache:
    """A cache [1, 1, block_tokens, head_dim] of which only positions [begin, end) may be touched."""

    def __init__(self, begin: int, end: int, block_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        """`begin` and `end` times the size of a position must be whole pages."""
        size = head_dim * dtype.itemsize
        self._memory = mmap.mmap(-1, block_tokens * size + 2 * mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + mmap.PAGESIZE
        for first, last in ((-mmap.PAGESIZE, begin * size), (end * size, block_tokens * size + mmap.PAGESIZE)):
            assert first % mmap.PAGESIZE == last % mmap.PAGESIZE == 0
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + first), ctypes.c_size_t(last - first), 0) == 0
        memory = (ctypes.c_byte * (block_tokens * size)).from_address(address)
        self.tensor: Tensor = torch.frombuffer(memory, dtype=dtype).view(1, 1, block_tokens, head_dim)
        self.tensor[0, 0, begin:end] = torch.randn(end - begin, head_dim)


@pytest.mark.parametrize("tokens", [1, 4, 32])
@pytest.mark.parametrize(
    ("dtype", "ranges"),
    [
        (torch.float32, [(0, 16), (0, 208), (0, 1024), (96, 144), (480, 1040)]),
        (torch.bfloat16, [(0, 32), (0, 1024), (96, 160), (480, 1056)]),
    ],
)
def test_nothing_is_read_before_or_behind_what_lives(
    kernel: AttendKernel, dtype: torch.dtype, ranges: list[tuple[int, int]], tokens: int
) -> None:
    for begin, end in ranges:
        assert_nothing_is_read_outside(kernel, begin, end, tokens, head_dim=64, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", FACTORS["head_dim"])
def test_heads_of_any_size_are_read_to_their_end_only(kernel: AttendKernel, head_dim: int) -> None:
    for begin, end in ((0, 256), (0, 1280), (256, 512), (512, 1280)):
        for tokens in (1, 4, 32, 100):
            for dtype in (torch.float32, torch.bfloat16):
                assert_nothing_is_read_outside(kernel, begin, end, tokens, head_dim=head_dim, dtype=dtype)


def assert_nothing_is_read_outside(
    kernel: AttendKernel, begin: int, end: int, tokens: int, *, head_dim: int, dtype: torch.dtype
) -> None:
    """A touch of guarded memory ends this process."""
    block_tokens = 1536
    tokens = min(tokens, end - begin)
    caches = [GuardedCache(begin, end, block_tokens, head_dim, dtype) for _ in range(2)]
    # The first token sees all positions from `begin` on, the last one those before `end`.
    window = end - begin - tokens + 1 if begin else 0
    step = AttentionStep(
        (end - tokens,), (tokens,), heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, cache_dtype=dtype
    )
    arguments, options = step.make_arguments(), {"scale": 0.125, "window": window, "max_context": block_tokens}
    arguments[3:5] = [cache.tensor for cache in caches]
    arguments[6] = torch.zeros(1, 1, dtype=torch.int32)
    attended = kernel.attend(arguments, options)
    whole = [torch.zeros(1, 1, block_tokens, head_dim, dtype=dtype) for _ in caches]
    for cache, copy in zip(caches, whole, strict=True):
        copy[0, 0, begin:end] = cache.tensor[0, 0, begin:end]
    expected = torch.ops.kiln.attend(*arguments[:3], *whole, *arguments[5:], **options)[0]
    tolerances = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(attended, expected, **tolerances)


@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_nothing_is_touched_beside_a_ring(kernel: AttendKernel, tokens: int) -> None:
    """Windows of 40 in a ring of whole pages, at all of its places; a touch of anything beside it ends this process."""
    head_dim, ring = 64, -(-(40 + tokens - 1) // 16) * 16
    caches = [GuardedCache(0, ring, ring, head_dim, torch.float32) for _ in range(2)]
    options = {"scale": 0.125, "window": 40, "max_context": 4096}
    for end in range(tokens, tokens + 2 * ring, 3):
        arguments = AttentionStep((end - tokens,), (tokens,), heads=2, kv_heads=1, head_dim=head_dim).make_arguments()
        arguments[6] = torch.zeros(1, 1, dtype=torch.int32)
        # The reference writes to the last block for tokens without a position, and there are none.
        expected = torch.ops.kiln.attend(*arguments[:3], *(cache.tensor for cache in caches), *arguments[5:], **options)
        arguments[3:5] = [cache.tensor for cache in caches]
        torch.testing.assert_close(kernel.attend(arguments, options), expected[0])
        assert arguments[3].equal(expected[1])
        assert arguments[4].equal(expected[2])
