"""Which process of a compiler dies or hangs, in the middle of what, and how what it worked on may then end."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Final

from tests.system.kills.kill import OPERATION, Death, Kill, cross
from tests.system.kills.points import (
    CHECKING,
    CLEARING,
    EXPORTING,
    LOADING,
    LOWERING,
    PLACING,
    PREPARING,
    RECORDING,
    SHARDING,
    STAGING,
    TAGGING,
    TRYING,
    UNPINNING,
    Before,
    Compiling,
    Interpreting,
    Point,
    Waiting,
    begins,
    blob,
    listed,
    lowered,
    removed,
    sharded,
)

#: Victim -> reasons with which operations or calls may end because of its death. They may also come to their end, and
#: those of the compiler itself do: it resumes them.
REASONS: Final[Mapping[str, frozenset[str]]] = {
    "compiler": frozenset(),
    OPERATION: frozenset({"COMPILE_CANCELLED"}),
    "kiln-plans": frozenset({"PLAN_FAILED"}),
    "kiln-plan": frozenset({"PLAN_FAILED"}),
    "kiln-fetches": frozenset({"PLAN_FAILED"}),
    "kiln-fetch": frozenset({"PLAN_FAILED"}),
    # A build may still tell what it has lost with its forkserver, before it dies of that itself.
    "kiln-builds": frozenset({"BUILD_FAILED", "LOWERING_FAILED", "TEXT_PROCESS_LOST"}),
    "kiln-build": frozenset({"BUILD_FAILED"}),
    "kiln-text": frozenset({"TEXT_PROCESS_LOST"}),
    "kiln-lowerings": frozenset({"LOWERING_FAILED"}),
    "kiln-lowering": frozenset({"LOWERING_FAILED"}),
    "cc1plus": frozenset({"LOWERING_FAILED"}),
    "kiln-rank-0": frozenset({"RANK_DIED"}),
    "kiln-rank-1": frozenset({"RANK_DIED"}),
}

#: What operations and calls say when a forkserver has taken them along, and when a build has hung.
WITH_FORKSERVER: Final = re.compile("with the process that it was forked from|its forkserver ended")
IDLE_TIMEOUT_S: Final = 20
STALLED: Final = f"computed nothing for {IDLE_TIMEOUT_S} s"

#: The compiler dies at each point, goes on behind what was finished, and comes to its end behind the last one. It does
#: not resume what it has died of three times, and replaces the index while it starts, too.
_REPEATED: Final[tuple[tuple[Point, ...], ...]] = (
    (PREPARING, begins("kiln-build")),
    (EXPORTING, lowered(1)),
    (lowered(2),),
    (STAGING, blob(1)),
    (blob(2), SHARDING),
    (sharded(1), begins("kiln-text")),
    (CHECKING, CHECKING),
    *((point,) for point in (blob(10), listed(1), UNPINNING, listed(2), listed(3), blob(14), TAGGING, CLEARING)),
)


def repeat(action: str, *points: Point) -> Kill[Point]:
    """The compiler dies at each of the points."""
    return Kill(action, tuple(Death("compiler", point) for point in points))


def hang(action: str, victim: str, point: Point, reason: str) -> Kill[Point]:
    return Kill(action, (Death(victim, point, signal.SIGSTOP, reason),))


def _resumed_shards(action: str) -> Kill[Point]:
    """The build dies when it has written some ranks, then the compiler while it writes others, then when all are."""
    deaths = (("kiln-build", sharded(3)), ("compiler", sharded(2)), ("compiler", CHECKING))
    return Kill(action, tuple(Death(*death) for death in deaths))


BUILD_KILLS: Final[tuple[Kill[Point], ...]] = (
    *(repeat("compile", *points) for points in _REPEATED),
    *cross("compile", ("kiln-builds",), (begins("kiln-build"), blob(1), CHECKING)),
    *cross("compile", ("kiln-build",), (EXPORTING, STAGING, SHARDING, blob(4), listed(1), UNPINNING)),
    *cross("compile", ("kiln-text",), (begins("kiln-text"),)),
    hang("compile", "kiln-build", begins("kiln-build"), "BUILD_STALLED"),
    hang("compile", "kiln-builds", Before(), "BUILD_FAILED"),
)

LOWERING_KILLS: Final[tuple[Kill[Point], ...]] = (
    repeat("lower", LOWERING, lowered(2)),
    *cross("lower", ("kiln-builds", "kiln-build", "kiln-lowerings", "kiln-lowering", OPERATION), (LOWERING,)),
    *cross("lower", ("cc1plus",), (Compiling(),)),
    hang("lower", "kiln-lowerings", begins("kiln-lowerings"), "LOWERING_FAILED"),
    # Two of neuronx-cc run, in sessions of their own or not; or a lowering has just begun an interpreter.
    *cross("lower for trn2", ("compiler",), (Waiting(2), Interpreting())),
    *cross("lower for trn2 in sessions", ("compiler",), (Waiting(2),)),
)

OTHER_KILLS: Final[tuple[Kill[Point], ...]] = (
    # The first text process of a build converts, the second one tries what it has made.
    repeat("convert", begins("kiln-text"), TRYING),
    *cross("convert", ("kiln-builds",), (begins("kiln-text"),)),
    *cross("convert", ("kiln-text",), (begins("kiln-text"), TRYING)),
    *cross("compile for two ranks", ("kiln-rank-0",), (begins("kiln-rank-1"),)),
    *cross("compile for two ranks", ("kiln-rank-1",), (LOADING,)),
    *map(_resumed_shards, ("compile for four ranks", "compile for four ranks, weights aside")),
    repeat("shard", begins("kiln-build"), SHARDING),
    *cross("shard", ("kiln-build",), (SHARDING,)),
    repeat("quantize", RECORDING, PLACING),
    *cross("quantize", ("kiln-build",), (RECORDING, PLACING)),
    *cross("plan", ("compiler", "kiln-plans"), (begins("kiln-plan"),)),
    *cross("plan", ("kiln-plan",), (begins("kiln-plan"),), fast=begins("kiln-plan")),
    *cross("plan a URL", ("compiler", "kiln-fetches", "kiln-fetch"), (begins("kiln-fetch"),)),
    *cross("import", ("compiler",), (blob(1), listed(1), TAGGING)),
    *cross("collect", ("compiler",), (listed(1), removed(1), removed(2))),
    *cross("delete", ("compiler",), (listed(1), removed(1))),
)

COMPILER_KILLS: Final = (*BUILD_KILLS, *LOWERING_KILLS, *OTHER_KILLS)
