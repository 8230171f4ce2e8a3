"""Places ranks on this runtime's logical cores, one core for each rank.

On cpu the runtime counts cores and pins no thread to one: the kernel places threads better than fixed numbers do, and
in containers and with hyper-threads the numbers of processors say little. On Neuron targets a core's number is that of
the logical NeuronCore which the rank's process takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import FieldViolation
from runtime_svc.errors import CoresUnavailable, RequestInvalid


class CorePool:
    """Cores 0 to `num_cores - 1`, each held by one holder, a deployment, at most."""

    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self._holders: dict[int, str] = {}
        self._broken: set[int] = set()

    @property
    def free(self) -> tuple[int, ...]:
        """The cores that no deployment holds and that are not broken, ascending."""
        return tuple(core for core in range(self.num_cores) if core not in self._holders and core not in self._broken)

    @property
    def broken(self) -> tuple[int, ...]:
        """The cores that need a reset, ascending. No deployment gets one until the runtime is started again."""
        return tuple(sorted(self._broken))

    def note_broken(self, core: int) -> None:
        """Takes a core out of service: the device says that it cannot go on without a reset."""
        self._broken.add(core)

    def require_working(self, cores: Sequence[int]) -> None:
        """Checks that cores which a deployment holds can run its ranks.

        Raises:
            CoresUnavailable: One of them needs a reset.
        """
        broken = sorted(self._broken & set(cores))
        if broken:
            wanted = f"cores {', '.join(map(str, broken))} need a reset of the device, and a restart of the runtime"
            raise CoresUnavailable(wanted, self.free, self.held)

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """The cores of each holder, both ascending."""
        names = sorted(set(self._holders.values()))
        return {name: tuple(sorted(core for core, one in self._holders.items() if one == name)) for name in names}

    def reserve(
        self, holder: str, num_ranks: int, wanted: Sequence[int], preferred: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Takes one core for each rank.

        Args:
            holder: Id of the deployment that takes them.
            num_ranks: Ranks of the bundle.
            wanted: The cores to take; empty takes the lowest free range, or the lowest free cores if no range is long
                enough.
            preferred: Cores to take if `wanted` is empty and all of them are free.

        Raises:
            RequestInvalid: `wanted` has another length, or a core twice.
            CoresUnavailable: A wanted core does not exist or is held, or there are too few.
        """
        if wanted and (len(wanted) != num_ranks or len(set(wanted)) != num_ranks):
            accepted = f"{num_ranks} different cores, one for each rank of the bundle"
            raise RequestInvalid([FieldViolation("cores", ", ".join(map(str, wanted)), accepted)])
        free = self.free
        if not set(wanted) <= set(free):
            raise CoresUnavailable(f"cores {', '.join(map(str, wanted))} are wanted", free, self.held)
        if num_ranks > len(free):
            raise CoresUnavailable(f"the bundle needs {num_ranks} cores", free, self.held)
        is_preferred = len(preferred) == num_ranks and set(preferred) <= set(free)
        cores = tuple(wanted) or (tuple(preferred) if is_preferred else _lowest(free, num_ranks))
        self._holders.update(dict.fromkeys(cores, holder))
        return cores

    def release(self, cores: Sequence[int]) -> None:
        """Gives back cores that a deployment holds."""
        assert set(cores) <= set(self._holders), f"{cores} are not all held"
        for core in cores:
            del self._holders[core]


def _lowest(free: tuple[int, ...], count: int) -> tuple[int, ...]:
    windows = (free[start : start + count] for start in range(len(free) - count + 1))
    return next((window for window in windows if window[-1] - window[0] == count - 1), free[:count])
