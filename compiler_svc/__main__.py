"""`python -m compiler_svc`: serves until SIGTERM, then drains."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import closing
from functools import partial

from compiler_svc.compiles.build_runner import BuildRunner
from compiler_svc.planning.pool import PlanningPool, make_fetch_forkserver, make_forkserver
from compiler_svc.server import open_server
from compiler_svc.settings import Settings, parse_settings
from edge.process import run_process
from edge.supervision import report_failure
from targets.neuron import FRONT_END, NEURON_PYTHON, TOP_K


async def serve(settings: Settings) -> None:
    """Serves until the process is told to stop. Prints one line when it is ready."""
    if settings.neuron_python is not None:
        # Like PATH for other compilers: the processes that ask for versions and lower inherit it.
        os.environ[NEURON_PYTHON.variable] = str(settings.neuron_python)
    for name, choice in ((FRONT_END, settings.neuron_front_end), (TOP_K, settings.neuron_top_k)):
        if choice is not None:
            os.environ[NEURON_PYTHON.choices[name].variable] = choice
    make_runner = partial(BuildRunner, idle_timeout_s=settings.build_idle_timeout_s)
    with closing(make_forkserver()) as forkserver, closing(make_fetch_forkserver()) as fetch_forkserver:
        planning = PlanningPool(forkserver)
        fetches = PlanningPool(fetch_forkserver, process_name="kiln-fetch")
        async with open_server(settings, make_runner, planning, fetches) as server:
            port = await server.start()
            warming = asyncio.create_task(planning.warm_up())
            warming.add_done_callback(report_failure)
            serving = asyncio.create_task(server.serve_until_signalled())
            await asyncio.sleep(0)  # by now it listens for signals; a reader of the next line may send one
            sys.stdout.write(f"ready address={settings.edge.address.rpartition(':')[0]}:{port}\n")
            sys.stdout.flush()
            await serving
            warming.cancel()


def main() -> None:
    """Serves the compiler; see `run_process`."""
    run_process("compiler", parse_settings, serve)


if __name__ == "__main__":
    main()
