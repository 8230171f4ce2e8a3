"""The services of one person on this host: the configuration of `kiln serve`, and of what `kiln run` starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kiln_client.stack.stack import StackConfig

LOOPBACK: Final = "127.0.0.1:0"
READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 45.0

#: Exit code if another process serves the home.
LOCKED_OUT: Final = 3

#: The runtime counts cores and pins nothing to them: models that wait for requests take turns on the processors.
MIN_CORES: Final = 16


def local_config(
    home: Path,
    model_roots: tuple[Path, ...],
    *,
    compiler_address: str = LOOPBACK,
    runtime_address: str = LOOPBACK,
    memory: str | None = None,
    allow_insecure: bool = False,
    is_detached: bool = False,
) -> StackConfig:
    """Makes the configuration of services for one person on this host.

    Args:
        home: Directory of all state.
        model_roots: Directories of checkpoints, besides `home`/models.
        compiler_address: `host:port` to bind; port 0 takes a free one.
        runtime_address: `host:port` to bind; port 0 takes a free one.
        memory: Memory for deployments, such as `6GiB`; None takes the runtime's default.
        allow_insecure: Whether the services may serve beyond loopback in plaintext.
        is_detached: Whether the services run in the background.
    """
    return StackConfig(
        home=home,
        compiler_address=compiler_address,
        runtime_address=runtime_address,
        num_cores=max(MIN_CORES, os.cpu_count() or 1),
        threads_per_core=None,
        memory=memory,
        deployments_path=None,
        capture_path=None,
        model_roots=model_roots,
        import_roots=(),
        tls=None,
        ready_timeout_s=READY_TIMEOUT_S,
        stop_timeout_s=STOP_TIMEOUT_S,
        allow_insecure=allow_insecure,
        is_detached=is_detached,
        # Models of one rank, which is most, get every processor that there is.
        warm_threads=len(os.sched_getaffinity(0)),
    )
