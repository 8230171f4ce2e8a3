"""The plan report: the answer to PlanCompile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler_svc.config import InferenceConfig
from compiler_svc.config.findings import Hint
from compiler_svc.config.submodels import SubmodelShape
from compiler_svc.planning.cost import CostEstimate
from compiler_svc.planning.graph_check import GraphCheck
from compiler_svc.planning.memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSizes:
    """The largest sizes that fit, each with all else as configured; 0 if not even 1 fits. `batch_size` is in rows of
    the KV cache, `seq_len` in tokens, `pa_num_blocks` in blocks of the cache, 0 also if it has no block layout.
    """

    batch_size: int
    seq_len: int
    pa_num_blocks: int

    @property
    def is_none(self) -> bool:
        """Whether no size fits."""
        return not (self.batch_size or self.seq_len or self.pa_num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExecutable:
    """One executable. The compile makes none if it `is_cached`: the cache has it now, or it `is_shared`, because an
    earlier one of the list has an equal graph.
    """

    tag: str
    submodel: str
    bucket: tuple[int, ...]
    is_cached: bool
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The executables, memory and cost of a compile that has not run.

    Attributes:
        limit_bytes: Memory that each rank may take.
        cores_needed: The target's smallest tensor-parallel degree at which ranks fit; 0 if none does.
        hints: Attributes that the target ignores; not among the warnings.
        cost: None if the compiler has never built anything similar.
    """

    config: InferenceConfig
    submodels: Sequence[SubmodelShape]
    memory: RankMemory
    limit_bytes: int
    largest: LargestSizes
    cores_needed: int
    executables: Sequence[PlannedExecutable]
    hints: Sequence[Hint]
    warnings: Sequence[str]
    cost: CostEstimate | None
    graph_check: GraphCheck | None

    @property
    def num_ranks(self) -> int:
        """Number of ranks; all need the same memory."""
        return self.config.neuron_config.tp_degree

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.memory.total_bytes <= self.limit_bytes
