"""A worker: the executables by themselves, as a rank runs them, and the limits of the machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bench.worker import serve, time_steps
from bundle.layout import Layout
from bundle.manifest import Executable
from bundle.reader import open_bundle
from execution.executors.executor import Executor, load_executor


def load(store: str, digests: dict[str, str], num_threads: int) -> int:
    """Loads bundles by name; returns the size of one bundle's weights in bytes."""
    torch.set_num_threads(num_threads)
    layout = Layout(Path(store))
    for name, digest in digests.items():
        manifest = open_bundle(layout, digest).manifest
        _LOADED[name] = (load_executor(manifest, 0, layout.blob_path), manifest.executables)
    return next(executor.weights_bytes for executor, _ in _LOADED.values())


def bandwidth() -> float:
    """Bytes per second that sums over 1 GiB of f32 read, at best: the limit of decoding."""
    data = _gibibyte()
    return data.nbytes / min(time_steps(data.sum, warm_up=1, steps=5))


def gemm() -> float:
    """Operations per second of torch's product of f32 matrices of 2048 × 2048, at best: the limit of prefill."""
    matrix = torch.ones(2048, 2048)
    return 2 * 2048**3 / min(time_steps(lambda: matrix @ matrix, warm_up=1, steps=3))


def decode(name: str, position: int, steps: int) -> list[float]:
    """Seconds of token_generation steps of all rows, one after the other."""
    executor, executable = _find(name, "token_generation", position + 1)
    rows = executable.batch_size
    inputs = {
        "input_ids": torch.full((rows, 1), 5, dtype=torch.int32),
        "position_ids": torch.full((rows, 1), position, dtype=torch.int32),
        "seq_ids": torch.arange(rows, dtype=torch.int32),
    }
    return _time(executor, executable, inputs, steps)


def prefill(name: str, steps: int) -> list[float]:
    """Seconds of context_encoding steps of one full prompt."""
    executor, executable = _find(name, "context_encoding")
    tokens = executable.bucket[0]
    inputs = {
        "input_ids": torch.arange(tokens, dtype=torch.int32)[None] + 5,
        "position_ids": torch.arange(tokens, dtype=torch.int32)[None],
        "seq_ids": torch.zeros(1, dtype=torch.int32),
        "num_tokens": torch.tensor([tokens], dtype=torch.int32),
    }
    return _time(executor, executable, inputs, steps)


_LOADED: dict[str, tuple[Executor, tuple[Executable, ...]]] = {}


def _find(name: str, submodel: str, length: int = 1) -> tuple[Executor, Executable]:
    """The executable of the smallest bucket that holds `length` tokens."""
    executor, executables = _LOADED[name]
    fitting = [one for one in executables if one.submodel == submodel and one.bucket[0] >= length]
    return executor, min(fitting, key=lambda one: one.bucket)


def _time(executor: Executor, executable: Executable, inputs: dict[str, Tensor], steps: int) -> list[float]:
    rows = executable.batch_size
    greedy = {"sampling_params": torch.tensor([[1.0, 1.0, 0.0]]).repeat(rows, 1), "rand": torch.zeros(rows, 1)}
    inputs |= {spec.name: greedy[spec.name] for spec in executable.inputs if spec.name in greedy}
    return time_steps(lambda: executor.run(executable.tag, inputs), warm_up=2, steps=steps)


@cache
def _gibibyte() -> Tensor:
    return torch.ones(1 << 28)


if __name__ == "__main__":
    serve({"load": load, "bandwidth": bandwidth, "gemm": gemm, "decode": decode, "prefill": prefill})
