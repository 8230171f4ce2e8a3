"""Times torch's linear layers as linear.cpp times ours, with the same words and the same answer. What torch has no
product for, float8 weights, becomes floats of the activations' dtype first.
"""

from __future__ import annotations

import sys
import time
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

#: (outputs, inputs) of one of a model's layers, as in linear.cpp.
LAYERS = ((2304, 768), (768, 768), (6144, 768), (768, 3072))
#: Inputs that share scales, of weights of four bits.
GROUP = 128


@torch.inference_mode()
def measure(dtype: torch.dtype, weights: list[Tensor], rows: int, seconds: float) -> tuple[float, float, float]:
    """Processor seconds of this thread, operations and bytes of weights."""
    inputs = {size: torch.full((rows, size), 0.5, dtype=dtype) for _, size in LAYERS}
    scales = {size: torch.full((size,), 0.5, dtype=dtype) for size, _ in LAYERS}
    pairs = {shape: torch.full((shape[1] // GROUP, shape[0], 2), 0.5, dtype=dtype) for shape in LAYERS}

    def multiply(weight: Tensor, shape: tuple[int, int]) -> Tensor:
        own, scale = inputs[shape[1]], scales[shape[0]]
        if weight.dtype == dtype:
            return functional.linear(own, weight)
        if weight.dtype == torch.uint8:
            return torch._weight_int4pack_mm_for_cpu(own, weight, GROUP, pairs[shape])  # noqa: SLF001 - as well
        if weight.dtype == torch.int8:
            return torch._weight_int8pack_mm(own, weight, scale)  # noqa: SLF001 - the only one that torch has
        return functional.linear(own, weight.to(dtype)) * scale

    taken = operations = size_bytes = 0.0
    for weight, shape in zip(weights, LAYERS, strict=False):
        multiply(weight, shape)
    while taken < seconds:
        for weight, shape in zip(weights, cycle(LAYERS), strict=False):
            start = time.thread_time()
            multiply(weight, shape)
            taken += time.thread_time() - start
            operations += 2.0 * rows * shape[0] * shape[1]
            size_bytes += weight.nbytes
            if taken >= seconds:
                break
    return taken, operations, size_bytes


def main(dtype: str, items: str, seconds: str, num_layers: str, *rows: str) -> None:
    """Prints for each number of rows: rows, processor seconds, operations, bytes of weights."""
    torch.set_num_threads(1)
    one_layer = [torch.ones(shape).to(getattr(torch, items)) for shape in LAYERS]
    if items == "uint8":
        pack = torch._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - as well
        one_layer = [pack(torch.ones(shape, dtype=torch.int32), 2) for shape in LAYERS]
    weights = [weight.clone() for _ in range(int(num_layers)) for weight in one_layer]
    for one in map(int, rows):
        print(one, *measure(getattr(torch, dtype), weights, one, float(seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
