"""Times torch's `scaled_dot_product_attention` as attend.cpp times ours, with the same words and the same answer."""

from __future__ import annotations

import sys
import time
from typing import Final

import torch
from torch.nn import functional

HEAD_DIM: Final = 64
CACHE_BYTES: Final = 128 << 20


@torch.inference_mode()
def measure(word: str, dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
    """Processor seconds of this thread, operations that count, and bytes of keys and values."""
    rows, tokens, live, heads, kv_heads = map(int, word.split(":"))
    layer_bytes = 2 * rows * kv_heads * live * HEAD_DIM * dtype.itemsize
    caches = torch.empty(max(CACHE_BYTES // layer_bytes, 1), 2, rows, kv_heads, live, HEAD_DIM, dtype=dtype)
    caches.copy_(0.25 + 0.001 * (torch.arange(HEAD_DIM) % 512))
    queries = torch.full((rows, tokens, heads, HEAD_DIM), 0.5, dtype=dtype).transpose(1, 2)
    seen = tokens * (live - tokens) + tokens * (tokens + 1) / 2
    # Single tokens see every position, prompts are causal by an option, chunks by a mask.
    options = {"enable_gqa": heads != kv_heads, "is_causal": 1 < tokens == live}
    mask = None if tokens in (1, live) else torch.ones(tokens, live, dtype=torch.bool).tril(live - tokens)
    taken = operations = size_bytes = 0.0
    functional.scaled_dot_product_attention(queries, *caches[0], attn_mask=mask, **options)
    layer = 0
    while taken < seconds:
        layer = (layer + 1) % len(caches)
        keys, values = caches[layer]
        start = time.thread_time()
        functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, **options)
        taken += time.thread_time() - start
        operations += 4.0 * HEAD_DIM * rows * heads * seen
        size_bytes += layer_bytes
    return taken, operations, size_bytes


def main(dtype: str, _cached: str, seconds: str, *words: str) -> None:
    """Prints for each shape: the shape, processor seconds, operations, bytes of keys and values."""
    torch.set_num_threads(1)
    for word in words:
        print(word, *measure(word, getattr(torch, dtype), float(seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
