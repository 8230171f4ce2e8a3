"""Points of what a compiler does at which the matrix kills its processes, all of them seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.store.layout import Layout
from compiler_svc.builds.finished_shards import FOLDER as SHARDED
from tests.processes import name_of
from tests.servers.compiler_process import CompilerProcess

_POLL_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Message:
    """The moment at which the operation reports a message, or up to `delay_s` after it."""

    text: str
    delay_s: float = 0.0

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        watching = compiler.client.compiler.WatchCompile(pb.WatchCompileRequest(operation=operation))
        async for event in watching:
            if event.progress.message.endswith(self.text) or event.WhichOneof("event") != "progress":
                break

    def __str__(self) -> str:
        return f"{self.text} + {self.delay_s:g} s"


@dataclass(frozen=True)
class Found:
    """The moment at which the store has more of certain files than before the action began, or went on."""

    what: str
    count: Callable[[Path], int]
    more: int = 1

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str, num_before: int) -> None:
        least = num_before + self.more
        waiting = asyncio.create_task(compiler.client.watch(operation))
        while not (self.count(home) >= least or waiting.done()):  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(_POLL_INTERVAL_S)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled() and isinstance(waiting.exception(), grpc.aio.AioRpcError):
            raise AssertionError(f"the compiler died before {self}")
        if self.count(home) < least:
            # The operation has ended, and its caller learns of it.
            await asyncio.Event().wait()

    def __str__(self) -> str:
        return f"{self.more} more {self.what}"


@dataclass(frozen=True)
class Running:
    """The moment at which the first or a later process of a name runs, or up to `delay_s` after it."""

    name: str
    delay_s: float = 0.0
    ordinal: int = 1

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        seen: set[int] = set()
        while len(seen) < self.ordinal:
            seen |= {process.pid for process in compiler.find(self.name)}
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        which = f" {self.ordinal}" if self.ordinal > 1 else ""
        return f"{self.name}{which} runs + {self.delay_s:g} s"


@dataclass(frozen=True)
class Interpreting:
    """The moment at which a lowering for Neuron has begun another interpreter."""

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        while not {*map(name_of, compiler.lowerings())} - {"kiln-lowering", ""}:  # noqa: ASYNC110 - none is announced
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        return "an interpreter runs"


@dataclass(frozen=True)
class After:
    """A share of the time that the action takes when it is left alone."""

    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of its time"


@dataclass(frozen=True)
class Before:
    """Before the action begins: the victim is idle."""

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        """Has passed."""

    def __str__(self) -> str:
        return "idle"


Point = Message | Found | Running | Interpreting | After | Before


def count_blobs(home: Path) -> int:
    return sum(1 for _ in Layout(home / "store").list_blobs())


def count_listed(home: Path) -> int:
    return len(Layout(home / "store").read_index().manifests)


def count_staged(home: Path) -> int:
    return len(list((home / "store" / ".kiln" / "staging").iterdir()))


def count_waiting(home: Path) -> int:
    """How many of neuronx-cc's double wait until they are killed."""
    return len(list((home / "waiting").glob("*")))


def list_lowered(home: Path) -> list[Path]:
    return list((home / "store" / "jobs").glob("*/lowered/*.json"))


def list_sharded(home: Path) -> list[Path]:
    return list((home / "store" / "jobs").glob(f"*/{SHARDED}/rank*.json"))


def blobs(more: int) -> Found:
    return Found("blobs", count_blobs, more)


def lowered(more: int) -> Found:
    return Found("lowered executables", lambda home: len(list_lowered(home)), more)


def sharded(more: int) -> Found:
    return Found("finished shards", lambda home: len(list_sharded(home)), more)


def listed(more: int) -> Found:
    """1: the bundle. 2, 3: its golden result and the list of its referrers. 4: its build record. 5: its tag."""
    return Found("entries of the index", count_listed, more)


STAGED = Found("unfinished blobs", count_staged)
