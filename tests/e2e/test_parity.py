"""Compiled bundles against transformers on the same weights, through the whole pipeline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bundle.layout import Layout
from bundle.reader import open_bundle
from execution.executor import Executor, load_executor
from tests.e2e.reference import GEOMETRIES, Reference, assert_same_tokens, write_checkpoint
from tests.e2e.stack import Stack, token_request, tokens_of

BUCKET = 16
CONFIG = {
    "neuron_config": {
        "seq_len": 128,
        "max_context_length": 32,
        "batch_size": 3,
        "torch_dtype": "float32",
        "enable_bucketing": True,
        "context_encoding_buckets": [BUCKET, 32],
        "token_generation_buckets": [32, 128],
        "is_continuous_batching": True,
        "ctx_batch_size": 1,
        "output_logits": True,
        "on_device_sampling_config": {"global_topk": 32, "dynamic": True},
    }
}
CASES = [
    *(pytest.param(geometry, 0, id=f"{geometry}-O0") for geometry in GEOMETRIES),
    *(pytest.param(geometry, 1, marks=pytest.mark.toolchain, id=f"{geometry}-O1") for geometry in GEOMETRIES),
    pytest.param("mha-bias-untied", 2, marks=[pytest.mark.toolchain, pytest.mark.slow], id="mha-bias-untied-O2"),
]


@pytest.fixture(scope="module")
def references(stack: Stack) -> dict[str, Reference]:
    return {geometry: write_checkpoint(stack.models / geometry, geometry) for geometry in GEOMETRIES}


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 211, (length,), generator=generator).tolist()


def deploy(stack: Stack, reference: Reference, level: int) -> tuple[str, str]:
    """Compiles and loads a geometry once; returns deployment id and bundle digest."""
    name = f"{reference.path.name}-o{level}"
    digest = stack.compile(name, reference.path, CONFIG, level=level)["bundle"]
    return stack.deploy(name, name), digest


def open_executor(home: Path, digest: str) -> Executor:
    layout = Layout(home / "store")
    bundle = open_bundle(layout, digest)
    return load_executor(bundle.manifest, 0, layout.blob_path)


def prefill_logits(executor: Executor, bucket: int, ids: list[int], slot: int) -> torch.Tensor:
    """Logits f32 [V] of the last prompt token."""
    padded = ids + [0] * (bucket - len(ids))
    inputs = {
        "input_ids": torch.tensor([padded], dtype=torch.int32),
        "position_ids": torch.arange(bucket, dtype=torch.int32)[None],
        "seq_ids": torch.tensor([slot], dtype=torch.int32),
        "num_tokens": torch.tensor([len(ids)], dtype=torch.int32),
        "sampling_params": torch.tensor([[1.0, 1.0, 0.0]]),
        "rand": torch.zeros(1, 1),
    }
    return executor.run(f"context_encoding_{bucket}", inputs)["logits"][0].clone()


def decode_logits(executor: Executor, bucket: int, token: int, position: int, slot: int) -> torch.Tensor:
    """Logits f32 [V] of one token; the other rows idle on the scratch slot."""
    rows = CONFIG["neuron_config"]["batch_size"]
    seq_ids = torch.full((rows,), rows, dtype=torch.int32)  # type: ignore[call-overload]
    ids = torch.zeros(rows, 1, dtype=torch.int32)  # type: ignore[call-overload]
    positions = torch.zeros(rows, 1, dtype=torch.int32)  # type: ignore[call-overload]
    seq_ids[slot], ids[slot, 0], positions[slot, 0] = slot, token, position
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "seq_ids": seq_ids,
        "sampling_params": torch.tensor([[1.0, 1.0, 0.0]]).repeat(rows, 1),  # type: ignore[arg-type]
        "rand": torch.zeros(rows, 1),  # type: ignore[call-overload]
    }
    return executor.run(f"token_generation_{bucket}", inputs)["logits"][slot].clone()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("geometry", "level"), CASES)
def test_logits_match_at_every_edge(stack: Stack, references: dict[str, Reference], geometry: str, level: int) -> None:
    reference = references[geometry]
    _, digest = deploy(stack, reference, level)
    executor = open_executor(stack.home, digest)
    for length in (1, BUCKET - 1, BUCKET, BUCKET + 1, 32):
        ids = prompt_of(length)
        expected = reference.logits(ids)
        bucket = BUCKET if length <= BUCKET else 32
        assert_close(prefill_logits(executor, bucket, ids, slot=length % 3), expected[-1])
    whole = prompt_of(31) + prompt_of(97, seed=1)
    expected = reference.logits(whole)
    prefill_logits(executor, 32, whole[:30], slot=1)
    for position in range(30, 128):
        logits = decode_logits(executor, 32 if position < 32 else 128, whole[position], position, slot=1)
        assert_close(logits, expected[position])


@pytest.mark.parametrize(("geometry", "level"), CASES)
def test_greedy_tokens_match_alone_and_in_company(
    stack: Stack, references: dict[str, Reference], geometry: str, level: int
) -> None:
    reference = references[geometry]
    deployment, _ = deploy(stack, reference, level)
    stub = stack.generation()
    prompts = [prompt_of(length) for length in (1, BUCKET - 1, BUCKET, BUCKET + 1)]
    expected = [reference.greedy(ids, 64) for ids in prompts]

    def generate(index: int, *, count: int = 64) -> list[int]:
        events = list(stub.Generate(token_request(deployment, prompts[index], count, temperature=0.0)))
        return tokens_of(events)

    num_ties = sum(assert_same_tokens(generate(i), *expected[i]) for i in range(len(prompts)))
    # Batch-mates of different lengths that come and go: eight requests over three slots.
    with ThreadPoolExecutor(8) as pool:
        short = [pool.submit(generate, i, count=5 + 7 * i) for i in range(4)]
        long = [pool.submit(generate, i) for i in range(4)]
        for i, future in enumerate(short):
            num_ties += assert_same_tokens(future.result(), expected[i][0][: 5 + 7 * i], expected[i][1][: 5 + 7 * i])
        for i, future in enumerate(long):
            num_ties += assert_same_tokens(future.result(), *expected[i])
    assert num_ties <= 1, f"{num_ties} comparisons ended in a tie"
