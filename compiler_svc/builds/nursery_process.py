"""The nursery of builds: `python -m compiler_svc.builds.nursery_process SOCKET_FD`.

Loads torch and transformers once, and is itself what the nursery of lowerings is forked from. Ends with its builds when
the service closes the socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from compiler_svc.builds.forked_lowerings import ForkedLowerings
from compiler_svc.models.registry import list_families
from compiler_svc.nurseries.fork_loop import ForkLoop
from execution.executors.executor import preload
from execution.ranks.parent_death import die_with_parent
from targets.cpu import EXPORTED_PROGRAM

#: What a build imports sooner or later, beside its own code.
_LOADED: Final = ("torch.export._trace", *(family.reference.partition(":")[0] for family in list_families().values()))


def main(socket_fd: int) -> None:
    """Serves one service until it hangs up."""
    die_with_parent(signal.SIGKILL)
    Path("/proc/self/comm").write_text("kiln-builds")
    # What libraries and compilers print would be taken for the service's own.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Takes seconds, with torch, and by now the process dies with its parent.
    from compiler_svc.builds.process import run_job  # noqa: PLC0415

    for module in _LOADED:
        import_module(module)
    preload(EXPORTED_PROGRAM.name)
    # What has been loaded stays shared with the builds as long as their collectors leave it alone.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=socket_fd) as requests:
        lowerings = ForkedLowerings()

        def run(request: bytes, report: socket.socket, nursery_pid: int) -> None:
            run_job(Path(os.fsdecode(request)), report, nursery_pid, lowerings.nursery)

        loop = ForkLoop(requests, "kiln-build", run, lambda: lowerings.ensure(loop))
        loop.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
