"""A worker: OpenVINO GenAI, in float32 throughout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.worker import serve

#: By default OpenVINO computes in bfloat16 where the processor can, and keeps 8-bit keys and values.
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def load(model: str, num_threads: int) -> str:
    """Converts the checkpoint with optimum-intel, without quantizing, and loads it; says how it runs."""
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
    """Seconds of one step of all rows: what a long answer takes longer than a short one, by step."""
    short = 4
    durations = [_generate(rows, context, tokens) for tokens in (short, short + steps)]
    return [(durations[1] - durations[0]) / steps]


def prefill(tokens: int, steps: int) -> list[float]:
    """Seconds of prompts with one token of answer."""
    return [_generate(1, tokens, 1) for _ in range(steps)]


def _generate(rows: int, context: int, tokens: int) -> float:
    # A first token of its own keeps a cache of prefixes from answering for the model.
    prompts = np.arange(context)[None].repeat(rows, 0) + 5
    prompts[:, 0] = np.random.default_rng().integers(5, 2000, rows)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
    config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    start = time.perf_counter()
    results = _LOADED[0].generate(inputs, config)
    duration = time.perf_counter() - start
    assert all(len(answer) == tokens for answer in results.tokens), "shorter answers than asked for"
    return duration


_LOADED: list[Any] = []

if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
