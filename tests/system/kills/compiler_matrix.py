"""Which process of a compiler dies or hangs, in the middle of what, and how what it worked on may then end."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Final

from tests.system.kills.kill import Death, Kill, cross
from tests.system.kills.points import (
    STAGED,
    After,
    Before,
    Found,
    Interpreting,
    Message,
    Point,
    Running,
    blobs,
    count_waiting,
    listed,
    lowered,
    sharded,
)

#: The operation itself, which is cancelled.
OPERATION: Final = "operation"

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
    "kiln-builds": frozenset({"BUILD_FAILED", "TEXT_PROCESS_LOST"}),
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
_CHECKING: Final = Message("comparing logits with the reference")

#: The compiler dies twice; the third attempt comes to its end.
_TWICE: Final[tuple[tuple[Point, Point], ...]] = (
    (Message("exporting the graphs"), listed(1)),
    (Message("starting the build"), blobs(2)),
    (blobs(4), listed(4)),
    (Message("hashing the checkpoint"), Message("writing the rank weight shards")),
    (Message("starting the build", 0.5), _CHECKING),
    (Message("starting the build", 1.5), Message("publishing")),
    (Message("exporting the graphs", 0.3), lowered(1)),
    (Message("compiling the graphs"), Message("publishing", 0.005)),
    (lowered(3), STAGED),
    (blobs(1), blobs(3)),
    (blobs(5), blobs(6)),
    (blobs(7), blobs(8)),
    (blobs(9), listed(2)),
    (listed(3), blobs(11)),
    (blobs(13), listed(5)),
    (Message("comparing logits with the reference", 0.5), Message("comparing logits with the reference", 1.5)),
    *((After(random.Random(seed).random()), After(random.Random(seed + 4).random())) for seed in range(4)),
)


def repeat(action: str, *points: Point) -> Kill[Point]:
    """The compiler dies at each of the points."""
    return Kill(action, tuple(Death("compiler", point) for point in points))


def hang(action: str, victim: str, point: Point, reason: str) -> Kill[Point]:
    return Kill(action, (Death(victim, point, signal.SIGSTOP, reason),))


def _resumed_shards(action: str) -> Kill[Point]:
    """The build dies when it has written some ranks, then the compiler while it writes others, then when all are."""
    deaths = (("kiln-build", sharded(2)), ("compiler", sharded(1)), ("compiler", _CHECKING))
    return Kill(action, tuple(Death(*death) for death in deaths))


def _neuron() -> Iterator[Kill[Point]]:
    """Two of neuronx-cc run, in sessions of their own or not; or a lowering has just begun an interpreter."""
    for action in ("lower for trn2", "lower for trn2 in sessions"):
        yield from cross(action, ("compiler",), (Found("waiting neuronx-cc", count_waiting, 2), Interpreting()))


COMPILER_KILLS: Final[tuple[Kill[Point], ...]] = (
    *cross("compile", ("compiler", "kiln-builds", "kiln-build"), _STAGES),
    *cross("compile", ("compiler", "kiln-build"), _LAST),
    *cross("compile", ("compiler",), (listed(4),)),
    *cross("compile", ("kiln-text",), (Running("kiln-text"),)),
    *(repeat("compile", *points) for points in _TWICE),
    hang("compile", "kiln-build", Running("kiln-build"), "BUILD_STALLED"),
    hang("compile", "kiln-builds", Before(), "BUILD_FAILED"),
    # The first text process of a build converts, the second one tries what it has made.
    *cross("convert", ("compiler", "kiln-builds", "kiln-build", "kiln-text"), (Running("kiln-text"),)),
    *cross("convert", ("compiler", "kiln-text"), (Running("kiln-text", ordinal=2),)),
    *cross("compile for two ranks", _RANKS, (Running("kiln-rank-1"), Running("kiln-rank-1", 0.3))),
    *map(_resumed_shards, ("compile for four ranks", "compile for four ranks, weights aside")),
    *cross("lower", ("compiler", "kiln-builds", "kiln-build"), (Running("kiln-lowering", 1),)),
    repeat("lower", lowered(1), _CHECKING),
    *cross("lower", ("kiln-lowerings",), (Running("kiln-lowerings", 0.5), Running("kiln-lowering", 0.5))),
    *cross("lower", ("kiln-lowering", OPERATION), (Running("kiln-lowering", 0.5),)),
    *cross("lower", ("cc1plus",), (Running("cc1plus"),)),
    hang("lower", "kiln-lowerings", Running("kiln-lowerings"), "LOWERING_FAILED"),
    *_neuron(),
    *cross(
        "shard",
        ("compiler", "kiln-build"),
        (Message("starting the build", 0.2), Message("writing the rank weight shards")),
    ),
    *cross("plan", ("compiler", "kiln-plans"), (Running("kiln-plan"),)),
    *cross("plan", ("kiln-plan",), (Running("kiln-plan"),), fast=Running("kiln-plan")),
    *cross("plan a URL", ("compiler", "kiln-fetches", "kiln-fetch"), (Running("kiln-fetch"),)),
    *cross("import", ("compiler",), _SHARES),
    *cross("collect", ("compiler",), _SHARES),
    *cross("delete", ("compiler",), _SHARES[:2]),
)
