"""What processes leave when they are killed, and who removes it: one table, which docs/operations/processes.md shows.

Whatever is found after a kill and stands neither here nor among what a service keeps is a leak, and fails the kill
matrix; so does what stands here and outlives the moment at which it is to go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final


class Moment(IntEnum):
    """When something is removed; what goes at one moment has gone at the later ones too."""

    #: Once the service has noticed the death: the operation has ended, the ranks have restarted.
    NOTICED = 0
    #: What was killed has been done again.
    REPEATED = 1
    #: The next collection of garbage.
    COLLECTED = 2
    #: The next start of the service.
    STARTED = 3
    #: Never: it stays, in a bounded number, and the next one is written over it.
    REPLACED = 4


#: The words of docs/operations/processes.md for each moment.
WORDS: Final[Mapping[Moment, str]] = {
    Moment.NOTICED: "once it notices the death, or at its own next start",
    Moment.REPEATED: "the end of an equal build, an hour after the death, or the next start",
    Moment.COLLECTED: "the next collection, or the next start",
    Moment.STARTED: "the next start",
    Moment.REPLACED: "the next one is written over it",
}


@dataclass(frozen=True)
class Leftover:
    """A kind of file that a killed process may leave.

    Attributes:
        processes: Names of the processes that may leave it.
        what: What it is, for the page.
        place: The directory that it is in: a key of `PLACES`.
        pattern: Regular expression of its path below that directory.
        shown: That path as the page shows it.
        remover: Who removes it.
    """

    processes: tuple[str, ...]
    what: str
    place: str
    pattern: str
    shown: str
    remover: str
    moment: Moment


@dataclass(frozen=True)
class Descriptor:
    """A memory file, socket or pipe: it has no name, and the kernel frees it with the last process that has it open.

    Attributes:
        holders: Names of the processes that have it open.
        pattern: Regular expression of the target of its link in `/proc/PID/fd`.
        closer: Who closes it when one of the others has died.
    """

    holders: tuple[str, ...]
    what: str
    pattern: str
    closer: str


#: Directories of the services, by the words of the page.
PLACES: Final[Mapping[str, str]] = {
    "store": "`--store`",
    "models": "`--model-root`",
    "compiler cache": "the compiler's `--cache`",
    "runtime cache": "the runtime's `--cache`",
    "state": "`--state`",
    "captures": "`--capture-directory`",
    "temporary": "`TMPDIR` of both, and `XDG_RUNTIME_DIR`",
}

_WRITERS: Final = ("compiler", "kiln-build")
_LOWERINGS: Final = ("kiln-build", "kiln-lowerings", "kiln-lowering")

LEFTOVERS: Final = (
    Leftover(
        _WRITERS,
        "an unfinished blob",
        "store",
        r"\.kiln/staging/[^/]+",
        ".kiln/staging/*",
        "the compiler",
        Moment.NOTICED,
    ),
    Leftover(
        _WRITERS,
        "the list of a writer's blobs",
        "store",
        r"\.kiln/pins/[^/]+",
        ".kiln/pins/*",
        "the compiler",
        Moment.COLLECTED,
    ),
    Leftover(
        _WRITERS,
        "a blob of no bundle, a bundle of no version",
        "store",
        r"blobs/sha256/[0-9a-f]{64}",
        "blobs/sha256/*",
        "the compiler",
        Moment.COLLECTED,
    ),
    Leftover(
        ("compiler",),
        "files of a plan that checks graphs",
        "store",
        r"jobs/plan-[^/]+(/.*)?",
        "jobs/plan-*/",
        "the compiler",
        Moment.STARTED,
    ),
    Leftover(
        ("compiler", *_LOWERINGS),
        "scratch files of a build",
        "store",
        r"jobs/[^/]+/work(/.*)?",
        "jobs/BUILD/work/",
        "the compiler",
        Moment.NOTICED,
    ),
    Leftover(
        ("compiler", *_LOWERINGS),
        "the directory of a build: finished executables, records of finished shards; the shards stay as long",
        "store",
        r"jobs/[^/]+/((lock|outside|(lowered|sharded|aside)(/.*)?))?",
        "jobs/BUILD/",
        "the compiler",
        Moment.REPEATED,
    ),
    Leftover(
        ("compiler", "kiln-build"),
        "the files of a quantized checkpoint that is not whole",
        "models",
        r"(.*/)?\.[^/]+\.[0-9a-f]{12}/(.*)?",
        ".NAME.*/",
        "the compiler",
        Moment.REPEATED,
    ),
    Leftover(
        _WRITERS,
        "a half-written index",
        "store",
        r"\.(index\.json|oci-layout)\.new",
        ".index.json.new",
        "the next writer",
        Moment.REPLACED,
    ),
    Leftover(
        ("kiln-lowering",),
        "half a header, object or script of all lowerings",
        "compiler cache",
        r"lowering/(objects/[^/]+\.new|bin/[^/]+\.new|headers/.*\.(tmp|new)[^/]*)",
        "lowering/*/*.new",
        "the next lowering that needs it",
        Moment.REPLACED,
    ),
    Leftover(
        ("kiln-fetch", "kiln-fetches"),
        "part of a checkpoint that a URL names, or of what plans read of it",
        "compiler cache",
        r"checkpoints/(outlines/)?\.[0-9a-f]+\.part(/.*)?",
        "checkpoints/.*.part/",
        "the compiler",
        Moment.NOTICED,
    ),
    Leftover(
        ("runtime",),
        "an unfinished fetched blob",
        "runtime cache",
        r"blobs/\.kiln/staging/[^/]+",
        "blobs/.kiln/staging/*",
        "the runtime",
        Moment.STARTED,
    ),
    Leftover(
        ("runtime",),
        "an unfinished file of captured inputs",
        "captures",
        r"[^/]+/\.[^/]+\.partial",
        "DEPLOYMENT/.*.partial",
        "the runtime",
        Moment.STARTED,
    ),
)

#: Files that services keep: no leftovers. By place, regular expressions of their paths.
KEPT: Final[Mapping[str, tuple[str, ...]]] = {
    "store": (
        r"(index\.json|oci-layout|jobs/|\.kiln/staging/|\.kiln/pins/|blobs/sha256/)",
        r"blobs/sha256/[0-9a-f]{64}",
        r"\.kiln/lock",
        r"compiler\.lock",
        r"(kiln\.db|verified\.sqlite)(-wal|-shm|-journal)?",
    ),
    "models": (r"[^.].*",),
    "compiler cache": (r"lowering(/.*)?", r"checkpoints(/outlines)?/([0-9a-f]+(/.*)?|\.[0-9a-f]+\.lock)?"),
    "runtime cache": (
        r"blobs/(index\.json|oci-layout|\.kiln/lock|\.kiln/staging/|\.kiln/pins/|blobs/sha256/([0-9a-f]{64})?)",
        r"verified\.db(-wal|-shm|-journal)?",
    ),
    "state": (r"runtime\.(db(-journal)?|lock)",),
    "captures": (r"[^/]+/([^/.][^/]*\.safetensors)?",),
    "temporary": (r"(files|run)/",),
}

_RANKS: Final = ("runtime", "kiln-build", "kiln-rank-N")

DESCRIPTORS: Final = (
    Descriptor(
        _RANKS,
        "inputs and outputs of the steps of a group of ranks",
        "/memfd:kiln-steps",
        "the process that started the group",
    ),
    Descriptor(
        _RANKS, "sums over the ranks of a group", "/memfd:kiln-collectives", "the process that started the group"
    ),
    Descriptor(("kiln-rank-N",), "what a rank is started with", "/memfd:kiln-launch", "the rank, once it has read it"),
    Descriptor(
        ("compiler", "kiln-plan", "kiln-fetch", "kiln-build", "kiln-lowering", "kiln-text"),
        "the order and the answer of a process that does one thing",
        r"/memfd:kiln-(order|answer)",
        "the process that started it",
    ),
    Descriptor(
        ("compiler", "runtime", "kiln-build", "kiln-rank-N"),
        "sockets, pipes and process descriptors between a process and those that it started",
        r"socket:|pipe:|anon_inode:\[pidfd\]",
        "either end, when the other one has ended",
    ),
)


def find_leaks(places: Mapping[str, Path]) -> list[str]:
    """Files that stand neither among the leftovers nor among what services keep."""
    return [
        f"{place}: {path}"
        for place, root in places.items()
        for path in _list_files(root)
        if not any(re.fullmatch(pattern, path) for pattern in _known(place))
    ]


def find_left(places: Mapping[str, Path], moment: Moment, kept: Collection[str] = ()) -> list[str]:
    """Leftovers that are there although their moment has come.

    Args:
        kept: Paths that have the pattern of a leftover and are none, such as the blobs of bundles.
    """
    return [
        f"{place}: {path}, {row.what}"
        for row in LEFTOVERS
        if row.moment <= moment
        for place, root in places.items()
        if place == row.place
        for path in _list_files(root)
        if re.fullmatch(row.pattern, path) and path not in kept
    ]


def _known(place: str) -> list[str]:
    return [*KEPT[place], *(row.pattern for row in LEFTOVERS if row.place == place)]


def _list_files(root: Path) -> list[str]:
    """Files and links below a directory, and directories that hold nothing, which end in `/`."""
    found = []
    for folder, folders, names in os.walk(root):
        below = Path(folder).relative_to(root)
        found += [str(below / name) for name in (*names, *(one for one in folders if Path(folder, one).is_symlink()))]
        if not (folders or names or below == Path()):
            found.append(f"{below}/")
    return found
