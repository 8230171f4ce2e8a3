"""`python -m runtime_svc`: serves until SIGTERM, then drains."""

from __future__ import annotations

import sys
from functools import partial

from edge.process import run_process
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from runtime_svc.host_cores import settle_cores
from runtime_svc.server import open_server
from runtime_svc.settings import Settings, parse_settings


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Prints one line when it is ready."""
    settings = await settle_cores(settings)
    timeout_s = settings.min_step_timeout_s
    with RankForkservers(settings.num_cores, patience_s=timeout_s) as forkservers:
        start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open, min_step_timeout_s=timeout_s)
        async with open_server(settings, start_ranks) as server:
            port = await server.start()
            sys.stdout.write(f"ready address={settings.edge.address.rpartition(':')[0]}:{port}\n")
            sys.stdout.flush()
            await server.serve_until_signalled()


def main() -> None:
    """Serves the runtime; see `run_process`."""
    run_process("runtime", parse_settings, serve)


if __name__ == "__main__":
    main()
