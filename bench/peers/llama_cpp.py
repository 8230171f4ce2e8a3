"""A worker: llama.cpp through llama-cpp-python's bindings of its C interface, weights quantized or in the one dtype."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

from bench.peers import ADAPTERS, LORA
from bench.peers.gguf_file import write_adapter, write_gguf
from bench.worker import serve, time_steps

#: llama.cpp's types of keys and values, by the numbers of its files: the bindings lack names for some of them.
_CACHE_TYPES = {"float32": int(gguf.GGMLQuantizationType.F32), "bfloat16": int(gguf.GGMLQuantizationType.BF16)}


def load(
    *, model: str, dtype: str, weights: str, num_threads: int, max_rows: int, max_length: int, max_prompt: int
) -> str:
    """Writes the checkpoint as GGUF, unless that was done, and loads it; returns a note on how it runs.

    `weights` is a type of files as `llama-quantize` names it, such as Q4_K_M; none leaves them in `dtype`. LORA does,
    too, and gives every sequence the first adapter, since all of a step have the same. Other arguments: see
    `bench.eager`.
    """
    has_adapter, weights = weights == LORA, weights.removeprefix(LORA)
    llama_cpp.llama_log_set(_SILENT, None)
    llama_cpp.llama_backend_init()
    path = Path(f"{model}.{weights or dtype}.gguf")
    if not path.exists():
        plain = path.with_suffix(".plain") if weights else path
        write_gguf(Path(model), plain)
        if weights:
            _quantize(plain, path, weights, num_threads)
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    sizes = {"decode": (max_rows, max_length), "prefill": (1, max_prompt)}
    for action, (sequences, length) in sizes.items():
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = sequences * length
        parameters.n_seq_max = sequences
        parameters.n_batch = max(512, length)
        parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = num_threads
        parameters.type_k = parameters.type_v = _CACHE_TYPES[dtype]
        context = llama_cpp.llama_init_from_model(loaded, parameters)
        if not context:
            raise RuntimeError("llama.cpp makes no context of this file")
        if has_adapter:
            _apply(f"{model}{ADAPTERS}/0", model, loaded, context)
        _CONTEXTS[action] = context
    adapted = ", one adapter for all sequences" if has_adapter else ""
    how = f"{weights}, activations in 8 bits as it multiplies them" if weights else dtype
    return f"llama-cpp-python {llama_cpp.__version__}, built for this host, {how}, keys and values {dtype}{adapted}"


def decode(rows: int, context: int, steps: int) -> dict[str, Any]:
    """Times steps of one token per row, each row a sequence of its own, after a prompt of `context` tokens."""
    loaded = _CONTEXTS["decode"]
    _clear(loaded)
    for row in range(rows):
        _run(loaded, [(row, position) for position in range(context)])
    positions = itertools.count(context)

    def step() -> None:
        position = next(positions)
        _run(loaded, [(row, position) for row in range(rows)], every=True)

    return time_steps(step, warm_up=2, steps=steps)


def prefill(tokens: int, steps: int) -> dict[str, Any]:
    """Times prompts, with the logits of the last token."""
    loaded = _CONTEXTS["prefill"]

    def step() -> None:
        _clear(loaded)
        _run(loaded, [(0, position) for position in range(tokens)])

    return time_steps(step, warm_up=1, steps=steps)


#: By the action that uses it. Each has room for its sequences alone.
_CONTEXTS: dict[str, Any] = {}
_SILENT = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


def _quantize(plain: Path, path: Path, weights: str, num_threads: int) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights}")
    options.nthread = num_threads
    code = llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(options))
    plain.unlink()
    if code != 0:
        raise RuntimeError(f"llama_model_quantize answered {code}")


def _apply(adapter: str, model: str, loaded: Any, context: Any) -> None:
    path = Path(f"{adapter}.gguf")
    if not path.exists():
        write_adapter(Path(adapter), Path(model), path)
    opened = llama_cpp.llama_adapter_lora_init(loaded, str(path).encode())
    if not opened or llama_cpp.llama_set_adapter_lora(context, opened, 1.0) != 0:
        raise RuntimeError("llama.cpp does not take this adapter")


def _clear(context: Any) -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)


def _run(context: Any, tokens: Sequence[tuple[int, int]], *, every: bool = False) -> None:
    """Runs one token for each (sequence, position), with logits of every token or of the last one."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for number, (row, position) in enumerate(tokens):
        batch.token[number] = 5 + position
        batch.pos[number] = position
        batch.n_seq_id[number] = 1
        batch.seq_id[number][0] = row
        batch.logits[number] = ctypes.c_int8(every or number == len(tokens) - 1).value
    if (code := llama_cpp.llama_decode(context, batch)) != 0:
        raise RuntimeError(f"llama_decode answered {code}")
    llama_cpp.llama_synchronize(context)
    llama_cpp.llama_batch_free(batch)


if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
