"""Notices files of bundles that are written while ranks map them: the ranks would compute with other numbers."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from execution.errors import MappedFileChanged
from runtime_svc.deployments.launcher import GroupLauncher
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.state import EngineState

#: Seconds between two looks. A look reads the times of each file: microseconds.
INTERVAL_S: Final = 5.0

_log = structlog.get_logger("deployments")


class FileWatch:
    """Looks at the files of every deployment, and ends ranks whose files have changed.

    They restart, which verifies the files: a deployment whose file is damaged fails with `BLOB_CORRUPT`.
    """

    def __init__(self, deployments: Deployments, *, interval_s: float = INTERVAL_S) -> None:
        """Looks at nothing before `run`; then every `interval_s` seconds."""
        self._deployments = deployments
        self._interval_s = interval_s

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            for deployment in self._deployments.list():
                engine = deployment.engine
                if engine is None or engine.state is not EngineState.READY:
                    continue
                assert isinstance(engine.launcher, GroupLauncher)
                # In a thread, because a file system of the network may take its time.
                title = await asyncio.to_thread(engine.launcher.find_changed)
                if title is not None:
                    _log.error("a mapped file has changed", deployment_id=deployment.deployment_id, title=title)
                    engine.end_ranks(MappedFileChanged(title))
