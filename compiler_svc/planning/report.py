"""A plan: the answer to PlanCompile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler_svc.config import InferenceConfig
from compiler_svc.config.findings import Hint
from compiler_svc.config.submodels import SubmodelShape
from compiler_svc.planning.cost import CostEstimate
from compiler_svc.planning.memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSizes:
    """The largest sizes that fit, each with all else as configured; 0 where not even 1 does.

    Attributes:
        batch_size: Rows of the KV cache.
        seq_len: In tokens.
        pa_num_blocks: Blocks of the KV cache; 0 without block layout, too.
    """

    batch_size: int
    seq_len: int
    pa_num_blocks: int

    @property
    def is_none(self) -> bool:
        """Whether nothing fits, however small."""
        return not (self.batch_size or self.seq_len or self.pa_num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExecutable:
    """One executable, and whether the cache has it now."""

    tag: str
    submodel: str
    bucket: tuple[int, ...]
    is_cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a compile would make.

    Attributes:
        memory: Of each rank.
        limit_bytes: What each rank may take.
        cores_needed: Smallest degree of the target's whose ranks fit; 0 where none does.
        hints: What the target ignores; not among the warnings.
        cost: None where nothing like it was built.
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

    @property
    def num_ranks(self) -> int:
        """Ranks, all alike."""
        return self.config.neuron_config.tp_degree

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.memory.total_bytes <= self.limit_bytes
