"""What the documents say of each target: memory of a core, degrees of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler_svc.config import NeuronConfig

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


@dataclass(frozen=True, slots=True)
class RankLimit:
    """What one rank may take.

    Attributes:
        core_memory_bytes: Memory of a core, where the caller says.
        host_bytes: Memory of the host, for a target whose ranks share it.
    """

    target: PlannedTarget
    core_memory_bytes: int | None
    host_bytes: int

    def measure(self, config: NeuronConfig) -> int:
        """Bytes that a rank of a configuration may take."""
        if self.core_memory_bytes is not None:
            return self.core_memory_bytes
        if self.target.physical_core_bytes is None:
            return self.host_bytes // config.tp_degree
        return self.target.physical_core_bytes * config.logical_nc_config


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
