"""`python -m runtime_svc`: serves until SIGTERM, then drains."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import structlog

from bundle.errors import KilnError
from edge.logs import configure_logging
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from runtime_svc.server import open_server
from runtime_svc.settings import Settings, parse_settings


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Prints one line when it is ready."""
    with RankForkservers(settings.num_cores) as forkservers:
        async with open_server(settings, partial(RankGroup.start, open_forkserver=forkservers.open)) as server:
            port = await server.start()
            sys.stdout.write(f"ready address={settings.edge.address.rpartition(':')[0]}:{port}\n")
            sys.stdout.flush()
            await server.serve_until_signalled()


def main() -> None:
    """Reads the command line and serves. If a named error ends the process, prints its message."""
    configure_logging("runtime")
    try:
        settings = parse_settings(sys.argv[1:])
        configure_logging("runtime", settings.log_level)
        asyncio.run(serve(settings))
    except KilnError as error:
        structlog.get_logger("runtime").error("cannot serve", reason=error.reason, error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
