"""A double of neuronx-distributed, by the recorded signatures; see `recorded`."""

from neuronx_distributed.trace.parallel_context import NxDParallelState

__all__ = ["NxDParallelState"]
