"""What the documents say of each target: memory of a core, degrees of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTarget:
    """A target as plans know it.

    Attributes:
        tp_degrees: Degrees of tensor parallelism, ascending.
        physical_core_bytes: Memory of one physical core; None: all ranks share the host's memory.
        note: What of it is not from the documents; empty where all is.
    """

    tp_degrees: tuple[int, ...]
    physical_core_bytes: int | None
    note: str = ""

    def rank_limit_bytes(self, *, cores_per_rank: int, tp_degree: int, host_bytes: int) -> int:
        """Memory that one rank may take, where the caller does not say.

        Args:
            cores_per_rank: Physical cores of a logical one.
            tp_degree: Ranks.
            host_bytes: Memory of the host, for a target whose ranks share it.
        """
        if self.physical_core_bytes is None:
            return host_bytes // tp_degree
        return self.physical_core_bytes * cores_per_rank


#: The documents give 24 GB for trn2 with LNC 2, that is two physical cores, and 16 GB for inf2 and trn1.
TARGETS: Final[Mapping[str, PlannedTarget]] = {
    "cpu": PlannedTarget(tp_degrees=(1, 2, 4, 8, 16, 32, 64), physical_core_bytes=None),
    "inf2": PlannedTarget(tp_degrees=(1, 2, 4, 8, 24), physical_core_bytes=16 * _GIB),
    "trn1": PlannedTarget(tp_degrees=(1, 2, 8, 16, 32), physical_core_bytes=16 * _GIB),
    "trn2": PlannedTarget(tp_degrees=(1, 2, 4, 8, 16, 32, 64), physical_core_bytes=12 * _GIB),
    "trn3": PlannedTarget(
        tp_degrees=(1, 2, 4, 8, 16, 32, 64),
        physical_core_bytes=18 * _GIB,
        note="target.kind: trn3's 36 GiB of a core with LNC 2 and its tp degrees are unverified",
    ),
}
