"""The nursery of lowerings: `python -m compiler_svc.lower.nursery_process SOCKET_FD`, or forked by the one of builds.

Loads Inductor once, when the first lowering is asked for.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

from compiler_svc.lower.process import load_inductor, run_call
from compiler_svc.nurseries.fork_loop import ForkLoop
from execution.ranks.parent_death import die_with_parent

#: As a module, for whoever starts it.
MODULE: Final = "compiler_svc.lower.nursery_process"


def serve(requests: socket.socket, parent_pid: int | None = None) -> None:
    """Serves until nobody can ask any more.

    Args:
        parent_pid: The process that this one was forked from, and ends with; None for the one that started it.
    """
    die_with_parent(signal.SIGKILL, parent_pid)
    Path("/proc/self/comm").write_text("kiln-lowerings")
    ForkLoop(requests, "kiln-lowering", run_call, _prepare).serve()


def _prepare() -> None:
    if "compiler_svc.lower.aoti" not in sys.modules:
        load_inductor()
        # What has been loaded stays shared with the lowerings as long as their collectors leave it alone.
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    # What libraries print would be taken for the service's own.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with socket.socket(fileno=int(sys.argv[1])) as own_requests:
        serve(own_requests)
