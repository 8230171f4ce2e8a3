"""Which process of a compiler dies, in the middle of what, and how what it worked on may then end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.servers.compiler_process import CompilerProcess
from tests.system.compiler_svc.builds.crash_points import RESULT, STAGED, Found, Message, blobs, listed

_POLL_INTERVAL_S: Final = 0.001

#: Victim -> reasons with which operations or calls may end because of its death. They may also come to their end, and
#: those of the compiler itself do: it resumes them.
REASONS: Final[Mapping[str, frozenset[str]]] = {
    "compiler": frozenset(),
    "kiln-plans": frozenset({"PLAN_FAILED"}),
    "kiln-plan": frozenset({"PLAN_FAILED"}),
    "kiln-fetches": frozenset({"PLAN_FAILED"}),
    "kiln-fetch": frozenset({"PLAN_FAILED"}),
    "kiln-builds": frozenset({"BUILD_FAILED"}),
    "kiln-build": frozenset({"BUILD_FAILED"}),
    "kiln-text": frozenset({"TEXT_PROCESS_LOST"}),
    "kiln-lowerings": frozenset({"LOWERING_FAILED"}),
    "kiln-lowering": frozenset({"LOWERING_FAILED"}),
    "cc1plus": frozenset({"LOWERING_FAILED"}),
    "kiln-rank-0": frozenset({"RANK_DIED"}),
    "kiln-rank-1": frozenset({"RANK_DIED"}),
}


@dataclass(frozen=True)
class Running:
    """The moment at which a process of a name runs, or `delay_s` after it."""

    name: str
    delay_s: float = 0.0

    async def wait(self, compiler: CompilerProcess, home: Path, operation: str) -> None:
        while not compiler.find(self.name):  # noqa: ASYNC110 - processes announce no start
            await asyncio.sleep(_POLL_INTERVAL_S)
        await asyncio.sleep(self.delay_s)

    def __str__(self) -> str:
        return f"{self.name} runs + {self.delay_s:g} s"


@dataclass(frozen=True)
class After:
    """A share of the time that the action takes when it is left alone."""

    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of its time"


Point = Message | Found | Running | After


@dataclass(frozen=True)
class Kill:
    """One point of the matrix.

    Attributes:
        action: A key of the actions of `test_compiler_kills`.
        victim: Name of the process that is killed.
        is_fast: Whether `make test` has it.
    """

    action: str
    victim: str
    point: Point
    is_fast: bool = False

    def __str__(self) -> str:
        return f"{self.action}, {self.victim}, {self.point}"


def cross(action: str, victims: Collection[str], points: Collection[Point]) -> Iterator[Kill]:
    for victim in victims:
        for point in points:
            yield Kill(action, victim, point)


_STAGES: Final = (
    Message("starting the build", 0.2),
    Message("exporting the graphs", 0.1),
    STAGED,
    blobs(1),
    Message("writing the rank weight shards"),
    Message("comparing logits with the reference", 0.1),
)
_LAST: Final = (Message("publishing"), blobs(3), listed(1))
_RANKS: Final = ("kiln-rank-0", "kiln-rank-1")
_SHARES: Final = (After(0.2), After(0.5), After(0.8))

COMPILER_KILLS: Final = (
    *cross("compile", ("compiler", "kiln-builds", "kiln-build"), _STAGES),
    *cross("compile", ("compiler", "kiln-build"), _LAST),
    Kill("compile", "compiler", RESULT),
    Kill("compile", "kiln-text", Running("kiln-text")),
    # The first text process of a build converts, the second one tries what it has made.
    *cross("convert", ("compiler", "kiln-builds", "kiln-build", "kiln-text"), (Running("kiln-text"),)),
    *cross("convert", ("compiler", "kiln-text"), (Running("kiln-text", 0.1),)),
    *cross("compile for two ranks", _RANKS, (Running("kiln-rank-1"), Running("kiln-rank-1", 0.3))),
    *cross("lower", ("compiler", "kiln-builds", "kiln-build"), (Running("kiln-lowering", 1),)),
    Kill("lower", "kiln-lowerings", Running("kiln-lowerings", 0.5)),
    Kill("lower", "kiln-lowerings", Running("kiln-lowering", 0.5)),
    Kill("lower", "kiln-lowering", Running("kiln-lowering", 0.5)),
    Kill("lower", "cc1plus", Running("cc1plus")),
    *cross(
        "shard",
        ("compiler", "kiln-build"),
        (Message("starting the build", 0.2), Message("writing the rank weight shards")),
    ),
    Kill("plan", "compiler", Running("kiln-plan")),
    Kill("plan", "kiln-plans", Running("kiln-plan")),
    Kill("plan", "kiln-plan", Running("kiln-plan"), is_fast=True),
    *cross("plan a URL", ("compiler", "kiln-fetches", "kiln-fetch"), (Running("kiln-fetch"),)),
    *cross("import", ("compiler",), _SHARES),
    *cross("collect", ("compiler",), _SHARES),
    *cross("delete", ("compiler",), _SHARES[:2]),
)
