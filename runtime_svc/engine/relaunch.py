"""Launches a rank group in place of one that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from bundle.errors import KilnError, ResourcesShort
from bundle.shortage import lasting_delays, naming_shortages
from runtime_svc.engine.ranks import RankLauncher, Ranks

#: Seconds before each launch; if the last one fails, the engine fails.
RESTART_DELAYS_S: Final = (0.0, 0.5, 2.0, 8.0)

_log = structlog.get_logger("engine")


async def relaunch(launcher: RankLauncher, deployment_id: str, on_shortage: Callable[[ResourcesShort], None]) -> Ranks:
    """Launches ranks, a few times if that fails, and as often as it takes while the host is short of something.

    Args:
        launcher: Starts the ranks.
        deployment_id: For logs.
        on_shortage: Called whenever a launch has met a shortage.

    Raises:
        KilnError: The last launch failed; no rank is left running.
    """
    delays_s, shortage_delays_s = iter(RESTART_DELAYS_S), lasting_delays()
    delay_s: float | None = next(delays_s)
    while True:
        await asyncio.sleep(delay_s or 0.0)
        try:
            with naming_shortages():
                return await launcher.launch()
        except ResourcesShort as shortage:
            _log.warning("restart is delayed", deployment_id=deployment_id, error=str(shortage))
            on_shortage(shortage)
            delay_s = next(shortage_delays_s)
        except KilnError as failure:
            _log.warning("restart failed", deployment_id=deployment_id, error=str(failure))
            delay_s = next(delays_s, None)
            if delay_s is None:
                raise
