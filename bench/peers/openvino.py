"""A worker: OpenVINO GenAI, weights compressed or in the one dtype."""

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


#: NNCF's compression of weights, by the word for it: symmetric with a scale for each output, or with a scale and a zero
#: point for each group of inputs. The output layer, too, which by default stays at 8 bits, because it is ours, too.
_COMPRESSIONS: Final[dict[str, dict[str, Any]]] = {
    "int8": {"bits": 8, "sym": True},
    "int4": {"bits": 4, "sym": False, "group_size": 128, "ratio": 1.0, "all_layers": True},
}


def load(
    *, model: str, dtype: str, weights: str, num_threads: int, max_rows: int, max_length: int, max_prompt: int
) -> str:
    """Converts the checkpoint with optimum-intel, unless that was done, and loads it; returns a note on how it runs.

    `weights` is a name of `_COMPRESSIONS`; none leaves them in `dtype`. Other arguments: see `bench.eager`.
    """
    del max_rows, max_length, max_prompt
    directory = Path(f"{model}-openvino-{weights or dtype}")
    if not directory.exists():
        _convert(model, directory, weights)
    precision = _PRECISIONS[dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": num_threads,
    }
    if not weights:  # else as by default, in which it multiplies quantized weights fastest
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    _LOADED.append(openvino_genai.LLMPipeline(str(directory), "CPU", **properties))
    how = f"{weights} {_COMPRESSIONS[weights]}, activations as by default" if weights else dtype
    return f"openvino-genai {openvino_genai.__version__.split('-')[0]}, {how}, keys and values {dtype}"


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


def _convert(model: str, directory: Path, weights: str) -> None:
    from openvino_tokenizers import convert_tokenizer  # noqa: PLC0415
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # noqa: PLC0415 - loads for seconds
    from transformers import AutoTokenizer  # noqa: PLC0415

    compression: dict[str, Any] = {"load_in_8bit": False}
    if weights:
        compression = {"quantization_config": OVWeightQuantizationConfig(**_COMPRESSIONS[weights])}
    converted = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **compression)
    converted.save_pretrained(directory)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, directory / f"openvino_{name}.xml")


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
