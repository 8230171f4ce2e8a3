"""Points of a compile at which a test kills the compiler, all of them seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.layout import Layout
from tests.servers.compiler_process import CompilerProcess

_POLL_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Message:
    """The moment at which the operation reports a message, or `delay_s` after it."""

    text: str
    delay_s: float = 0.0

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        watching = compiler.client.compiler.WatchCompile(pb.WatchCompileRequest(operation=operation))
        async for event in watching:
            if event.progress.message.endswith(self.text) or event.WhichOneof("event") != "progress":
                break
        await asyncio.sleep(self.delay_s)

    def __str__(self) -> str:
        return f"{self.text} + {self.delay_s:g} s"


@dataclass(frozen=True)
class Found:
    """The moment at which the store has certain files."""

    what: str
    count: Callable[[Path], int]
    more: int = 1

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        least = self.count(home) + self.more
        waiting = asyncio.create_task(compiler.client.watch(operation))
        while not (self.count(home) >= least or waiting.done()):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(_POLL_INTERVAL_S)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled() and isinstance(waiting.exception(), grpc.aio.AioRpcError):
            raise AssertionError(f"the compiler died before {self}")

    def __str__(self) -> str:
        return f"{self.more} more {self.what}"


def count_blobs(home: Path) -> int:
    return sum(1 for _ in Layout(home / "store").list_blobs())


def count_lowered(home: Path) -> int:
    return len(list((home / "store" / "jobs").glob("*/lowered/*.json")))


def count_listed(home: Path) -> int:
    return len(Layout(home / "store").read_index().manifests)


def count_results(home: Path) -> int:
    return len(list((home / "store" / "jobs").glob("*/result.json")))


def count_staged(home: Path) -> int:
    return len(list((home / "store" / ".kiln" / "staging").iterdir()))


def blobs(more: int) -> Found:
    return Found("blobs", count_blobs, more)


def lowered(more: int) -> Found:
    return Found("lowered executables", count_lowered, more)


def listed(more: int) -> Found:
    """1: the bundle. 2, 3: its golden result and the list of its referrers. 4: its build record. 5: its tag."""
    return Found("entries of the index", count_listed, more)


STAGED = Found("unfinished blobs", count_staged)
RESULT = Found("results", count_results)
