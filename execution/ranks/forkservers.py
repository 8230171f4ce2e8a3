"""The forkservers that fork rank processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.watch import PATIENCE_S
from execution.threads import thread_environment

#: torch's Inductor makes its cache directory when a process imports it, and no rank or build ever writes there: one
#: that exists is not left behind.
INDUCTOR_ENVIRONMENT: Final = {"TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}

_PRELOAD: Final = "execution.ranks.process:preload"

#: Returns the forkserver for a number of threads per rank and an executable format.
OpenForkserver = Callable[[int, str], ForkserverClient]


class RankForkservers:
    """One forkserver for each number of threads and each executable format.

    OpenMP reads the number of threads when torch is loaded. And while a forkserver imports the modules of a format,
    which takes a second, it cannot notice that a rank of another format ends.
    """

    def __init__(self, num_ranks: int = 1, *, patience_s: float = PATIENCE_S) -> None:
        """Starts nothing yet.

        The threads of `num_ranks` ranks, which may compute at the same time, spin while they wait if each has a
        processor; see `execution.threads`.
        """
        self._patience_s = patience_s
        self._num_ranks = num_ranks
        self._forkservers: dict[tuple[int, str], Forkserver] = {}

    def open(self, num_threads: int, executable_format: str) -> Forkserver:
        """Returns the forkserver for this number of threads per rank and this format."""
        kind = (num_threads, executable_format)
        if kind not in self._forkservers:
            self._forkservers[kind] = Forkserver(
                "kiln-forkserver",
                Call(_PRELOAD, (executable_format,)),
                kind="rank",
                environment={**thread_environment(num_threads, num_ranks=self._num_ranks), **INDUCTOR_ENVIRONMENT},
                patience_s=self._patience_s,
            )
        return self._forkservers[kind]

    async def warm_up(self, num_threads: int, executable_format: str) -> None:
        """Lets a forkserver load what its ranks need, which it would do for the first of them."""
        call = Call(_PRELOAD, (executable_format,))
        process = self.open(num_threads, executable_format).start(call, name="kiln-warm-up")
        try:
            await process.wait()
        finally:
            process.kill()

    def close(self) -> None:
        """Ends the forkservers and their remaining ranks. Calling it again is harmless."""
        for forkserver in self._forkservers.values():
            forkserver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
