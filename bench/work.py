"""How much a step computes and reads: what limits say of the time that it must take."""

from __future__ import annotations

from dataclasses import dataclass

from bench.measurements import Reads
from bench.plan import Workload


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of one step.

    Attributes:
        operations: Additions and multiplications of matrix products and of attention.
        size_bytes: Weights, keys and values that are read.
    """

    operations: float
    size_bytes: float

    def least_s(self, rate: float, bandwidth: float) -> float:
        """Seconds of the step at `rate` operations and `bandwidth` bytes a second, whichever takes longer."""
        return max(self.operations / rate, self.size_bytes / bandwidth)


def decode_work(workload: Workload, parameters: int, reads: Reads, batch: int) -> Work:
    """The work of one token for each stream. A step multiplies `parameters`: all but other tokens' embeddings."""
    model, positions = workload.model, batch * (workload.decode_position(batch) + 1)
    attention = 4 * positions * model["hidden_size"] * model["num_hidden_layers"]
    return Work(2.0 * batch * parameters + attention, reads.weights_bytes + positions * reads.position_bytes)


def prefill_work(workload: Workload, parameters: int, reads: Reads, tokens: int) -> Work:
    """The work of one prompt. Every token passes through the layers, but only the last one needs logits."""
    model = workload.model
    head = model["vocab_size"] * model["hidden_size"]
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * pairs * model["hidden_size"] * model["num_hidden_layers"]
    linear = 2.0 * (tokens * (parameters - head) + head)
    return Work(linear + attention, reads.weights_bytes)
