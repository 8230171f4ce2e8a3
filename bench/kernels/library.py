"""Times torch's linear layers as linear.cpp times ours, with the same words and the same answer."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

#: (outputs, inputs) of one of a model's layers, as in linear.cpp.
LAYERS = ((2304, 768), (768, 768), (6144, 768), (768, 3072))


@torch.inference_mode()
def measure(weights: list[Tensor], rows: int, seconds: float) -> tuple[float, float, float]:
    """Processor seconds of this thread, operations and bytes of weights."""
    inputs = {size: torch.full((rows, size), 0.5, dtype=weights[0].dtype) for _, size in LAYERS}
    taken = operations = size_bytes = 0.0
    for weight in weights[: len(LAYERS)]:
        functional.linear(inputs[weight.shape[1]], weight)
    while taken < seconds:
        for weight in weights:
            start = time.thread_time()
            functional.linear(inputs[weight.shape[1]], weight)
            taken += time.thread_time() - start
            operations += 2.0 * rows * weight.numel()
            size_bytes += weight.nbytes
            if taken >= seconds:
                break
    return taken, operations, size_bytes


def main(dtype: str, seconds: str, num_layers: str, *rows: str) -> None:
    """Prints for each number of rows: rows, processor seconds, operations, bytes of weights."""
    torch.set_num_threads(1)
    weights = [torch.full(shape, 0.25, dtype=getattr(torch, dtype)) for _ in range(int(num_layers)) for shape in LAYERS]
    for one in map(int, rows):
        print(one, *measure(weights, one, float(seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
