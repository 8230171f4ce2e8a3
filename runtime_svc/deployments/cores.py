"""Places ranks on this runtime's logical cores, one core for each rank.

On cpu the runtime counts cores and pins no thread to one: the kernel places threads better than fixed numbers do, and
in containers and with hyper-threads the numbers of processors say little. On Neuron targets a core's number stands for
the logical NeuronCore which the rank's process takes, and the cores of a deployment follow each other: rank r has the
first core's number plus r. The host may number them otherwise; see `execution.visible_cores`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise

from bundle.errors import FieldViolation
from runtime_svc.errors import CoresUnavailable, RequestInvalid


class CoreState(enum.Enum):
    """What a core is used for."""

    #: A deployment may get it.
    FREE = "free"
    #: A deployment holds it.
    IN_USE = "in_use"
    #: It needs a reset of the device, whether a deployment holds it or not.
    BROKEN = "broken"


class CorePool:
    """Cores 0 to `num_cores - 1`, each held by one holder, a deployment, at most."""

    def __init__(self, num_cores: int, *, in_runs: bool = False, host_cores: Sequence[int] = ()) -> None:
        """Starts with all cores free; with `in_runs`, the cores of a deployment must follow each other.

        `host_cores` are the host's numbers of the cores; empty if they are the same.
        """
        self.num_cores = num_cores
        self.host_cores = tuple(host_cores[:num_cores])
        self._in_runs = in_runs
        self._holders: dict[int, str] = {}
        self._broken: set[int] = set()

    def list_in(self, state: CoreState) -> tuple[int, ...]:
        """Lists the cores in a state, ascending. Each core is in one."""
        return tuple(core for core in range(self.num_cores) if self._state_of(core) is state)

    def _state_of(self, core: int) -> CoreState:
        if core in self._broken:
            return CoreState.BROKEN
        return CoreState.IN_USE if core in self._holders else CoreState.FREE

    @property
    def free(self) -> tuple[int, ...]:
        """The cores that no deployment holds and that are not broken, ascending."""
        return self.list_in(CoreState.FREE)

    @property
    def broken(self) -> tuple[int, ...]:
        """The cores that need a reset, ascending. No deployment gets one until the runtime is started again."""
        return self.list_in(CoreState.BROKEN)

    def note_broken(self, core: int) -> None:
        """Takes a core out of service: the device says that it cannot go on without a reset."""
        self._broken.add(core)

    def require_working(self, cores: Sequence[int]) -> None:
        """Checks that cores which a deployment holds can run its ranks."""
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
        """Takes one core for each rank: the wanted ones, or else the preferred ones if all of them are free.

        Otherwise it takes the lowest free run, or the lowest free cores if no run is long enough and none is required.
        """
        if wanted and not self._suits(wanted, num_ranks):
            kind = "cores that follow each other, ascending" if self._in_runs else "different cores"
            accepted = f"{num_ranks} {kind}, one for each rank of the bundle"
            raise RequestInvalid([FieldViolation("cores", ", ".join(map(str, wanted)), accepted)])
        cores = tuple(wanted) or self._choose(num_ranks, preferred)
        if len(cores) < num_ranks or not set(cores) <= set(self.free):
            following = " that follow each other" if self._in_runs and num_ranks > 1 else ""
            need = f"the bundle needs {num_ranks} cores{following}"
            if wanted:
                need = f"cores {', '.join(map(str, wanted))} are wanted"
            working = set(range(self.num_cores)) - self._broken
            is_lasting = num_ranks > len(working) or not set(wanted) <= working
            raise CoresUnavailable(need, self.free, self.held, is_lasting=is_lasting)
        self._holders.update(dict.fromkeys(cores, holder))
        return cores

    def _suits(self, cores: Sequence[int], num_ranks: int) -> bool:
        return len(set(cores)) == len(cores) == num_ranks and (not self._in_runs or _is_run(cores))

    def _choose(self, num_ranks: int, preferred: Sequence[int]) -> tuple[int, ...]:
        """Chooses free cores; empty if there are none that suit."""
        free = self.free
        if self._suits(preferred, num_ranks) and set(preferred) <= set(free):
            return tuple(preferred)
        windows = (free[start : start + num_ranks] for start in range(len(free) - num_ranks + 1))
        scattered = () if self._in_runs or num_ranks > len(free) else free[:num_ranks]
        return next(filter(_is_run, windows), scattered)

    def release(self, cores: Sequence[int]) -> None:
        """Gives back cores that a deployment holds."""
        assert set(cores) <= set(self._holders), f"{cores} are not all held"
        for core in cores:
            del self._holders[core]


def _is_run(cores: Sequence[int]) -> bool:
    return all(following == core + 1 for core, following in pairwise(cores))
