"""A worker: the same model in transformers, eager."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.worker import serve, time_steps


def load(
    *, model: str, dtype: str, weights: str, num_threads: int, max_rows: int, max_length: int, max_prompt: int
) -> str:
    """Loads a checkpoint; returns a note on how it runs.

    Args:
        model: Directory of the checkpoint.
        dtype: Of weights, activations, keys and values.
        weights: The engine's own word for the format of weights, as `bench.formats` has it; none if it is `dtype`.
        max_rows: Rows that `decode` will be asked for.
        max_length: Positions that each of these rows may take.
        max_prompt: Tokens that `prefill` will be asked for.
    """
    assert weights == "", "a format of which bench.formats says that the peer has none"
    del max_rows, max_length, max_prompt
    torch.set_num_threads(num_threads)
    _LOADED.append(LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval())
    return f"{dtype}, keys and values {dtype}"


@torch.no_grad()
def decode(rows: int, context: int, steps: int) -> dict[str, Any]:
    """Times steps of one token per row, after a prompt of `context` tokens."""
    model = _LOADED[0]
    prompt = torch.arange(context)[None].repeat(rows, 1) + 5
    cache = model(prompt, use_cache=True).past_key_values
    token = torch.full((rows, 1), 5)
    return time_steps(lambda: model(token, past_key_values=cache, use_cache=True), warm_up=2, steps=steps)


@torch.no_grad()
def prefill(tokens: int, steps: int) -> dict[str, Any]:
    """Times prompts, with the logits of the last token."""
    prompt = torch.arange(tokens)[None] + 5
    return time_steps(lambda: _LOADED[0](prompt, use_cache=True, logits_to_keep=1), warm_up=1, steps=steps)


_LOADED: list[LlamaForCausalLM] = []

if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
