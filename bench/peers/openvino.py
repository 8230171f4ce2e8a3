"""A worker: OpenVINO GenAI, in one dtype throughout."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino
import openvino_genai

from bench.worker import serve

#: OpenVINO's names of dtypes. By default it computes in bfloat16 if the processor can, and keeps 8-bit keys and values.
_PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}


def load(*, model: str, dtype: str, num_threads: int, max_rows: int, max_length: int, max_prompt: int) -> str:
    """Converts the checkpoint with optimum-intel, without quantizing, and loads it; returns a note on how it runs."""
    del max_rows, max_length, max_prompt
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
    precision = _PRECISIONS[dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "INFERENCE_NUM_THREADS": num_threads,
    }
    _LOADED.append(openvino_genai.LLMPipeline(str(directory), "CPU", **properties))
    return f"openvino-genai {openvino_genai.__version__.split('-')[0]}, {dtype}, keys and values {dtype}"


def decode(rows: int, context: int, steps: int) -> dict[str, Any]:
    """Times steps of all rows, from the moments at which their tokens came.

    The processor time is that of whole answers without that of answers of one token, by steps.
    """
    tokens = steps + 2
    _generate(rows, context, 2)  # OpenVINO compiles for new shapes
    _, first_s, _ = _generate(rows, context, 1)
    _, all_s, results = _generate(rows, context, tokens)
    times = sorted(set(results.perf_metrics.raw_metrics.m_new_token_times))
    durations = [(later - earlier) / 1e3 for earlier, later in itertools.pairwise(times)]
    # Rows begin one after the other, so their first tokens come at different times.
    return {"wall_s": durations[-steps:], "cpu_s": (all_s - first_s) / (tokens - 1)}


def prefill(tokens: int, steps: int) -> dict[str, Any]:
    """Times prompts that are answered with one token."""
    _generate(1, tokens, 1)
    measured = [_generate(1, tokens, 1) for _ in range(steps)]
    return {"wall_s": [one[0] for one in measured], "cpu_s": sum(one[1] for one in measured) / steps}


def _generate(rows: int, context: int, tokens: int) -> tuple[float, float, Any]:
    """Answers prompts; returns the seconds by the clock, the processor seconds, and the answers."""
    # Each prompt begins with another token, so that a prefix cache cannot answer for the model.
    prompts = np.arange(context)[None].repeat(rows, 0) + 5
    prompts[:, 0] = np.random.default_rng().integers(5, 2000, rows)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    start, processor = time.perf_counter(), time.process_time()
    results = _LOADED[0].generate(inputs, config)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - processor
    assert all(len(answer) == tokens for answer in results.tokens), "shorter answers than asked for"
    return wall_s, cpu_s, results


_LOADED: list[Any] = []

if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
