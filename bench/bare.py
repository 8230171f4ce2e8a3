"""The executables by themselves, the reference beside them, and the memory that bounds both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bundle.layout import Layout
from bundle.reader import open_bundle
from execution.executor import load_executor

WARM_UP, STEPS = 5, 40


def median_s(action: Callable[[], object], *, steps: int = STEPS) -> float:
    """Median duration of an action, in seconds, after a warm-up."""
    durations = []
    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        action()
        if step >= WARM_UP:
            durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def measure_read_bandwidth(num_threads: int) -> float:
    """Bytes per second that a sum over 1 GiB of f32 reads: the limit of decoding."""
    torch.set_num_threads(num_threads)
    data = torch.ones(1 << 28)
    return data.nbytes / median_s(data.sum, steps=10)


def measure_decode_step(store: Path, digest: str, num_threads: int) -> tuple[float, int]:
    """Seconds of one token_generation step at batch 1, and the bytes of weights it reads."""
    torch.set_num_threads(num_threads)
    layout = Layout(store)
    manifest = open_bundle(layout, digest).manifest
    executor = load_executor(manifest, 0, layout.blob_path)
    executable = manifest.executables_of("token_generation")[0]
    inputs = {
        "input_ids": torch.tensor([[5]], dtype=torch.int32),
        "position_ids": torch.tensor([[20]], dtype=torch.int32),
        "seq_ids": torch.tensor([0], dtype=torch.int32),
        "sampling_params": torch.tensor([[1.0, 1.0, 0.0]]),
        "rand": torch.zeros(1, 1),
    }
    inputs = {spec.name: inputs[spec.name] for spec in executable.inputs}
    return median_s(lambda: executor.run(executable.tag, inputs)), executor.weights_bytes


@torch.no_grad()
def measure_eager_step(model: LlamaForCausalLM, num_threads: int) -> float:
    """Seconds of one decode step of transformers, eager, at batch 1."""
    torch.set_num_threads(num_threads)
    cache = model(torch.arange(5, 25)[None], use_cache=True).past_key_values

    def step() -> None:
        nonlocal cache
        cache = model(torch.tensor([[5]]), past_key_values=cache, use_cache=True).past_key_values

    return median_s(step)
