"""`python -m compiler_svc`: serves until SIGTERM, then drains."""

from __future__ import annotations

import asyncio
import sys

import structlog

from bundle.errors import KilnError
from compiler_svc.compiles.build_runner import ProcessBuildRunner
from compiler_svc.server import open_server
from compiler_svc.settings import Settings, parse_settings
from edge.logs import configure_logging


async def serve(settings: Settings) -> None:
    """Serves until the process is told to stop. Prints one line when it is ready."""
    async with open_server(settings, ProcessBuildRunner) as server:
        port = await server.start()
        serving = asyncio.create_task(server.serve_until_signalled())
        await asyncio.sleep(0)  # by now it listens for signals; a reader of the next line may send one
        sys.stdout.write(f"ready address={settings.edge.address.rpartition(':')[0]}:{port}\n")
        sys.stdout.flush()
        await serving


def main() -> None:
    """Reads the command line and serves; a named error ends the process with its message."""
    configure_logging("compiler")
    try:
        settings = parse_settings(sys.argv[1:])
        configure_logging("compiler", settings.log_level)
        asyncio.run(serve(settings))
    except KilnError as error:
        structlog.get_logger("compiler").error("cannot serve", reason=error.reason, error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
