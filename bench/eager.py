"""A worker: the same model in transformers, eager."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from bench.worker import serve, time_steps


def load(model: str, num_threads: int) -> str:
    """Loads a checkpoint; returns a note on how it runs."""
    torch.set_num_threads(num_threads)
    _LOADED.append(LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    return "float32"


@torch.no_grad()
def decode(rows: int, context: int, steps: int) -> list[float]:
    """Seconds of steps of one token per row, after a prompt of `context` tokens."""
    model = _LOADED[0]
    prompt = torch.arange(context)[None].repeat(rows, 1) + 5
    cache = model(prompt, use_cache=True).past_key_values
    token = torch.full((rows, 1), 5)
    return time_steps(lambda: model(token, past_key_values=cache, use_cache=True), warm_up=2, steps=steps)


@torch.no_grad()
def prefill(tokens: int, steps: int) -> list[float]:
    """Seconds of prompts, with the logits of the last token."""
    prompt = torch.arange(tokens)[None] + 5
    return time_steps(lambda: _LOADED[0](prompt, use_cache=True, logits_to_keep=1), warm_up=1, steps=steps)


_LOADED: list[LlamaForCausalLM] = []

if __name__ == "__main__":
    serve({"load": load, "decode": decode, "prefill": prefill})
