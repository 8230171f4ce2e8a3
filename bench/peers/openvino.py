"""A worker: OpenVINO GenAI, in float32 throughout."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.worker import serve

#: By default OpenVINO computes in bfloat16 if the processor can, and keeps 8-bit keys and values.
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def load(model: str, num_threads: int) -> str:
    """Converts the checkpoint with optimum-intel, without quantizing, and loads it; returns a note on how it runs."""
    directory = Path(f"{model}-openvino")
    if not directory.exists():
        from optimum.intel import OVModelForCausalLM  # noqa: PLC0415 - loads for seconds
        from transformers import AutoTokenizer  # noqa: PLC0415

        converted = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
        converted.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(model)
        from openvino_tokenizers import convert_tokenizer  # noqa: PLC0415

        for part, name in zip(
            convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
        ):
            openvino.save_model(part, directory / f"openvino_{name}.xml")
    _LOADED.append(openvino_genai.LLMPipeline(str(directory), "CPU", **PROPERTIES, INFERENCE_NUM_THREADS=num_threads))
    return f"openvino-genai {openvino_genai.__version__.split('-')[0]}, float32, keys and values float32"


def decode(rows: int, context: int, steps: int) -> list[float]:
    """Seconds of steps of all rows, from the times at which their tokens came."""
    _, results = _generate(rows, context, steps + 2)
    times = sorted(set(results.perf_metrics.raw_metrics.m_new_token_times))
    durations = [(later - earlier) / 1e3 for earlier, later in itertools.pairwise(times)]
    # Rows begin one after the other, so their first tokens come at different times.
    return durations[-steps:]


def prefill(tokens: int, steps: int) -> list[float]:
    """Seconds of prompts that are answered with one token."""
    return [_generate(1, tokens, 1)[0] for _ in range(steps)]


def _generate(rows: int, context: int, tokens: int) -> tuple[float, Any]:
    # Each prompt begins with another token, so that a prefix cache cannot answer for the model.
    prompts = np.arange(context)[None].repeat(rows, 0) + 5
    prompts[:, 0] = np.random.default_rng().integers(5, 2000, rows)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    start = time.perf_counter()
    results = _LOADED[0].generate(inputs, config)
    duration = time.perf_counter() - start
    assert all(len(answer) == tokens for answer in results.tokens), "shorter answers than asked for"
    return duration, results


_LOADED: list[Any] = []

if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
