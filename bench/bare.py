"""A worker: the executables by themselves, as a rank runs them."""

from __future__ import annotations

import atexit
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.worker import serve, time_steps
from bundle.abi.tensor import DTYPES
from bundle.manifest import ADAPTER_WEIGHTS, Executable, Manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from execution.dtypes import TORCH_DTYPES
from execution.executors.executor import Executor, load_executor
from execution.ranks.process import keep_freed_memory


def load(store: str, digests: dict[str, str], num_threads: int) -> dict[str, dict[str, float]]:
    """Loads bundles by name; returns what a decode step of each reads, as `bench.measurements.Reads`."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    layout = Layout(Path(store))
    reads = {}
    for name, digest in digests.items():
        manifest = open_bundle(layout, digest).manifest
        executor = load_executor(manifest, 0, layout.blob_path)
        # Positions that no step has written have memory of their own, too: else all of them were one page of zeros.
        executor.commit_state()
        for slot in range(manifest.num_adapter_slots):
            executor.write(ADAPTER_WEIGHTS, slot, _write_adapter(manifest, name))
        _LOADED[name] = (executor, manifest.executables)
        reads[name] = _count_reads(manifest)
    return reads


def decode(name: str, position: int, steps: int, num_adapters: int = 0) -> dict[str, Any]:
    """Times token_generation steps of all rows, which have so many adapters in turns, one after the other."""
    executor, executable = _find(name, "token_generation", position + 1)
    rows = executable.batch_size
    adapters = torch.arange(rows) % num_adapters if num_adapters else torch.full((rows,), -1)
    tokens = {
        "input_ids": torch.full((rows, 1), 5, dtype=torch.int32),
        "position_ids": torch.full((rows, 1), position, dtype=torch.int32),
        "adapter_ids": adapters.to(torch.int32),
    }
    return _time(executor, executable, tokens, steps, warm_up=2)


def swap(name: str, steps: int) -> dict[str, Any]:
    """Times how an adapter replaces another one in its slot."""
    executor, _ = _LOADED[name]
    return time_steps(lambda: executor.write(ADAPTER_WEIGHTS, 0, _ADAPTERS[name]), warm_up=1, steps=steps)


def prefill(name: str, tokens: int, steps: int, cached: int = 0, num_adapters: int = 0) -> dict[str, Any]:
    """Times context_encoding steps of one prompt that fills its bucket, behind so many tokens in the KV cache. It has
    the first of so many adapters.
    """
    executor, executable = _find(name, "context_encoding", tokens)
    assert executable.bucket[0] == tokens, f"no bucket of {tokens} tokens"
    prompt = torch.arange(tokens, dtype=torch.int32)[None]
    adapter = torch.tensor([0 if num_adapters else -1], dtype=torch.int32)
    inputs = {"input_ids": prompt + 5, "position_ids": prompt + cached, "adapter_ids": adapter}
    return _time(executor, executable, inputs, steps, warm_up=1, cached=cached)


_LOADED: dict[str, tuple[Executor, tuple[Executable, ...]]] = {}
#: A file of an adapter for each bundle that has room.
_ADAPTERS: dict[str, Path] = {}


def _write_adapter(manifest: Manifest, name: str) -> Path:
    """Writes random matrices, as small as those of an adapter that was trained."""
    if name not in _ADAPTERS:
        directory = tempfile.TemporaryDirectory()
        atexit.register(directory.cleanup)
        tensors = next(manifest.shards(mutable=True)).tensors
        matrices = {one.name: torch.randn(one.shape[1:], dtype=TORCH_DTYPES[one.dtype]) * 0.01 for one in tensors}
        _ADAPTERS[name] = Path(directory.name) / "adapter.safetensors"
        save_file(matrices, _ADAPTERS[name])
    return _ADAPTERS[name]


def _count_reads(manifest: Manifest) -> dict[str, float]:
    weights = [tensor for shard in manifest.shards() if shard.rank == 0 for tensor in shard.tensors]
    weights_bytes = sum(
        prod(tensor.shape) * DTYPES[tensor.dtype].size_bytes for tensor in weights if "embed_tokens" not in tensor.name
    )
    position_bytes = sum(
        prod(tensor.shape) // tensor.shape[0] // tensor.num_positions * DTYPES[tensor.dtype].size_bytes
        for tensor in manifest.state.tensors
    )
    return {"weights_bytes": weights_bytes, "position_bytes": position_bytes}


def _find(name: str, submodel: str, length: int) -> tuple[Executor, Executable]:
    """The executable of the smallest bucket that holds `length` tokens."""
    executor, executables = _LOADED[name]
    fitting = [one for one in executables if one.submodel == submodel and one.bucket[0] >= length]
    return executor, min(fitting, key=lambda one: one.bucket)


def _time(
    executor: Executor,
    executable: Executable,
    tokens: dict[str, Tensor],
    steps: int,
    *,
    warm_up: int,
    cached: int = 0,
) -> dict[str, Any]:
    """Times steps whose rows are all live, each in the slot of its number, and sampled greedily."""
    rows, num_tokens = tokens["input_ids"].shape
    known = tokens | {
        "seq_ids": torch.arange(rows, dtype=torch.int32),
        "num_tokens": torch.full((rows,), num_tokens, dtype=torch.int32),
        "computed_context_lens": torch.full((rows,), cached, dtype=torch.int32),
        "live_rows": torch.tensor([rows], dtype=torch.int32),
        "sampling_params": torch.tensor([[1.0, 1.0, 0.0]]).repeat(rows, 1),
        "noise_keys": torch.zeros(rows, 2, dtype=torch.int32),
    }
    inputs = {spec.name: known[spec.name] for spec in executable.inputs}
    return time_steps(lambda: executor.run(executable.tag, inputs), warm_up=warm_up, steps=steps)


if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill, "swap": swap})
