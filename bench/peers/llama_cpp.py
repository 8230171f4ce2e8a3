"""A worker: llama.cpp through llama-cpp-python's bindings of its C interface, in float32 throughout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from bench.peers.gguf_file import write_gguf
from bench.worker import serve, time_steps

#: Rows of the largest batch, and positions that each may take.
MAX_ROWS, MAX_LENGTH = 16, 256


def load(model: str, num_threads: int) -> str:
    """Writes the checkpoint as GGUF, unless that was done, and loads it; returns a note on how it runs."""
    path = Path(f"{model}.gguf")
    if not path.exists():
        write_gguf(Path(model), path)
    llama_cpp.llama_log_set(_SILENT, None)
    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = MAX_ROWS * MAX_LENGTH
    parameters.n_seq_max = MAX_ROWS
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = num_threads
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(weights, parameters)
    if not context:
        raise RuntimeError("llama.cpp makes no context of this file")
    _LOADED.append(context)
    return f"llama-cpp-python {llama_cpp.__version__}, built for this host, float32, keys and values float32"


def decode(rows: int, context: int, steps: int) -> list[float]:
    """Seconds of steps of one token per row, each row a sequence of its own, after a prompt of `context` tokens."""
    _clear()
    for row in range(rows):
        _run([(row, position) for position in range(context)])
    positions = iter(range(context, MAX_LENGTH))

    def step() -> None:
        position = next(positions)
        _run([(row, position) for row in range(rows)], every=True)

    return time_steps(step, warm_up=2, steps=steps)


def prefill(tokens: int, steps: int) -> list[float]:
    """Seconds of prompts, with the logits of the last token."""

    def step() -> None:
        _clear()
        _run([(0, position) for position in range(tokens)])

    return time_steps(step, warm_up=1, steps=steps)


_LOADED: list[Any] = []
_SILENT = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


def _clear() -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(_LOADED[0]), True)


def _run(tokens: Sequence[tuple[int, int]], *, every: bool = False) -> None:
    """Runs one token for each (sequence, position), with logits of every token or of the last one."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for number, (row, position) in enumerate(tokens):
        batch.token[number] = 5 + position
        batch.pos[number] = position
        batch.n_seq_id[number] = 1
        batch.seq_id[number][0] = row
        batch.logits[number] = ctypes.c_int8(every or number == len(tokens) - 1).value
    if (code := llama_cpp.llama_decode(_LOADED[0], batch)) != 0:
        raise RuntimeError(f"llama_decode answered {code}")
    llama_cpp.llama_synchronize(_LOADED[0])
    llama_cpp.llama_batch_free(batch)


if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
