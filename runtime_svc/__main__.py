"""`python -m runtime_svc`: serves until SIGTERM, then drains."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing, suppress
from functools import partial

from bundle.errors import ResourcesShort
from edge.process import run_process
from edge.supervision import report_failure
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.text.handle import make_forkserver
from runtime_svc.host_cores import settle_cores
from runtime_svc.server import open_server
from runtime_svc.settings import Settings, parse_settings
from targets.registry import TARGETS


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Prints one line when it is ready."""
    settings = await settle_cores(settings)
    timeout_s = settings.min_step_timeout_s
    with (
        RankForkservers(settings.num_cores, patience_s=timeout_s) as forkservers,
        closing(make_forkserver()) as texts,
    ):
        start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open, min_step_timeout_s=timeout_s)
        async with open_server(settings, start_ranks, texts) as server:
            port = await server.start()
            sys.stdout.write(f"ready address={settings.edge.address.rpartition(':')[0]}:{port}\n")
            sys.stdout.flush()
            warming = asyncio.create_task(_warm_up(forkservers, settings))
            warming.add_done_callback(report_failure)
            await server.serve_until_signalled()
            warming.cancel()


async def _warm_up(forkservers: RankForkservers, settings: Settings) -> None:
    """Loads what ranks of this host's formats need, one format after the other: clients are answered meanwhile."""
    if settings.warm_threads is None:
        return
    for executable_format in dict.fromkeys(lowering.format.name for lowering in TARGETS[settings.target].lowerings):
        with suppress(ResourcesShort):
            await forkservers.warm_up(settings.warm_threads, executable_format)


def main() -> None:
    """Serves the runtime; see `run_process`."""
    run_process("runtime", parse_settings, serve)


if __name__ == "__main__":
    main()
