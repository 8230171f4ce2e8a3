"""The compiler as users run it: `python -m compiler_svc` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from tests.hang_guard import HANG_S
from tests.lowering_cache import share_lowering_cache
from tests.processes import lives, living_descendants, name_of
from tests.repository import ROOT
from tests.servers.running_compiler import Client, options_of


class CompilerEnded(Exception):
    """The process ended before it was ready; its exit code."""


@dataclass(frozen=True)
class CompilerProcess:
    """A running compiler and a client of it."""

    process: asyncio.subprocess.Process
    client: Client

    def libraries(self) -> set[str]:
        """File names of the shared libraries that the process has mapped."""
        return list_libraries(self.process.pid)

    def builds(self) -> list[psutil.Process]:
        """Its build processes."""
        return self.find("kiln-build")

    def lowerings(self) -> list[psutil.Process]:
        """Its lowerings' processes, and the C++ compilers that they run."""
        return [
            process
            for lowering in self.find("kiln-lowering")
            for process in (lowering, *living_descendants(lowering.pid))
        ]

    def find(self, name: str) -> list[psutil.Process]:
        """Its processes of a name that have not ended."""
        return [child for child in living_descendants(self.process.pid) if name_of(child) == name]


@asynccontextmanager
async def run_compiler(home: Path, *options: str, site: Path | None = None) -> AsyncIterator[CompilerProcess]:
    """Starts a compiler with state below `home` and checkpoints below `home/models`; ends it with SIGTERM.

    Args:
        site: A directory of distributions that it finds besides those installed.
    """
    search_path = [str(path) for path in (site, ROOT, ROOT / "protos") if path is not None]
    share_lowering_cache(home / "cache")
    command = [sys.executable, "-m", "compiler_svc", *options_of(home), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path)}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line:
            raise CompilerEnded(await process.wait())
        assert line.startswith("ready address=127.0.0.1:"), line
        async with grpc.aio.insecure_channel(line.strip().removeprefix("ready address=")) as channel:
            yield CompilerProcess(process, Client(channel))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def list_libraries(pid: int) -> set[str]:
    """File names of what a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return {Path(path).name for path in maps if path.startswith("/")}


async def wait_until_gone(*processes: psutil.Process) -> None:
    """Waits until processes have ended, zombies included."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, HANG_S)
    assert [process for process in alive if lives(process)] == []
